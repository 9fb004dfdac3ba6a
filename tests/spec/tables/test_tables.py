"""The tables of a job: sound defaults, derived values, nonsense refused with a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from armillary.errors import BadRecipe
from armillary.spec.tables.serve import Predict, Serve
from armillary.spec.tables.traffic import Cost, Load, Objective, Traffic
from armillary.spec.tables.train import Data, TrainJob
from armillary.spec.toml.fields import build, help_of, to_plain

TABLES = {
    "data": Data,
    "train": TrainJob,
    "serve": Serve,
    "traffic": Traffic,
    "objective": Objective,
    "load": Load,
    "predict": Predict,
    "cost": Cost,
}


@pytest.mark.parametrize(("table", "cls"), TABLES.items())
def test_every_field_has_a_default_and_a_line_of_help(table: str, cls: type[Any]) -> None:
    job = cls()
    assert set(help_of(cls)) == set(to_plain(job))
    assert build(cls, to_plain(job), table) == job


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("train", {"steps": 0}),
        ("train", {"sequence": -1}),
        ("train", {"lr": 0.0}),
        ("train", {"lr": float("nan")}),
        ("train", {"betas": [0.9]}),
        ("train", {"betas": [0.9, 1.0]}),
        ("train", {"batch_tokens": 512}),
        ("train", {"steps": 10, "warmup_steps": 11}),
        ("train", {"lr": 1e-4, "min_lr": 1e-3}),
        ("train", {"decay_fraction": 1.5}),
        ("train", {"clip": -1.0}),
        ("data", {"held_out": 1.0}),
        ("data", {"held_out": -0.1}),
        ("data", {"vocab": 10}),
        ("data", {"workers": -1}),
        ("data", {"mix_shards": -1}),
        ("data", {"cache_bytes": 0}),
        ("serve", {"max_model_len": 0}),
        ("serve", {"block_tokens": 0}),
        ("traffic", {"requests_per_s": 0.0}),
        ("traffic", {"requests_per_s": float("inf")}),
        ("traffic", {"tokens_out": 0}),
        ("traffic", {"shared_prefix": 1000, "tokens_in": 10}),
        ("objective", {"ttft_p99_s": 0.0}),
        ("predict", {"max_batch": 0}),
        ("predict", {"max_delay_s": -1.0}),
        ("predict", {"preferred": [64]}),
        ("predict", {"timeout_s": 0.0}),
        ("load", {"concurrency": 0}),
        ("load", {"ramp_to": -1.0}),
        ("load", {"warmup_s": -1.0}),
        ("load", {"longest": 1}),
        ("cost", {"usd_per_device_hour": -1.0}),
        ("cost", {"pue": 0.9}),
        ("cost", {"utilisation": 0.0}),
        ("cost", {"years": 0.0}),
    ],
)
def test_nonsense_is_refused_and_the_suggestion_is_taken(table: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe) as caught:
        build(TABLES[table], values, table)
    sentence = str(caught.value)
    found = re.search(rf"; try --set {table}\.(\w+)=(\S+)$", sentence)
    assert found, sentence
    build(TABLES[table], values | {found[1]: found[2]}, table)


def test_a_refusal_reads_like_this() -> None:
    with pytest.raises(BadRecipe, match=r"^train\.steps=0 must be at least 1; try --set train\.steps=1000$"):
        TrainJob(steps=0)


def test_learning_rate_follows_published_models() -> None:
    """Llama: 7B 3e-4, 65B 1.5e-4, 405B 8e-5."""
    job = TrainJob()
    assert job.peak_lr(7_000_000_000) == pytest.approx(3e-4)
    assert job.peak_lr(65_200_000_000) == pytest.approx(1.5e-4, rel=0.06)
    assert job.peak_lr(405_000_000_000) == pytest.approx(8e-5, rel=0.06)
    assert job.peak_lr(1_000) == 3e-3
    assert job.final_lr(7_000_000_000) == pytest.approx(3e-5)
    assert TrainJob(lr=1e-3, min_lr=0.0).final_lr(7) == 0 and TrainJob(lr=1e-3).peak_lr(7) == 1e-3


def test_warmup_and_chunks_are_derived_unless_given() -> None:
    assert TrainJob(steps=200).warmup == 20 and TrainJob(steps=1_000_000).warmup == 2000
    assert TrainJob(steps=200, warmup_steps=0).warmup == 0
    assert TrainJob().chunk_tokens(128_256) == 1024 and TrainJob(loss_chunk=0).chunk_tokens(128_256) == 0
    assert TrainJob(steps=10, batch_tokens=2048).total_tokens == 20_480


def test_text_from_the_command_line_becomes_values() -> None:
    job = build(TrainJob, {"batch_tokens": "32_768", "lr": "none", "betas": "0.9,0.99", "compile": "true"}, "train")
    assert (job.batch_tokens, job.lr, job.betas, job.compile) == (32_768, None, (0.9, 0.99), True)
