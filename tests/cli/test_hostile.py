"""What a careless or unlucky user does: one line on stderr, exit code 2, and nothing lost or half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from tests.conftest import Ran
from tests.model.layers.test_attention_forms import small

Cli = Callable[..., Ran]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 30, 280)
    tokenizer.save(tmp_path / "tokenizer")
    made = build(small(vocab=tokenizer.vocab_size), dtype=torch.float32, device="cpu", seed=3)
    return save_model(made, tmp_path / "model", template=tmp_path / "tokenizer")


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one_line(ran: Ran, expected: str) -> None:
    assert ran.code == 2, (ran.out, ran.err)
    said = [line for line in ran.err.splitlines() if not line.endswith(" elapsed")]  # progress, on a slow machine
    assert len(said) == 1 and said[0].startswith("error: ") and expected in said[0], ran.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--temperature", "nan"], "temperature"),
        (["--seed", "9" * 30], "seed"),
        (["--device", "meta"], "not one we run on"),
        (["--max-tokens", "60", "the quick " * 200], "shorten the prompt"),
    ],
)
def test_generate_refuses(words: list[str], expected: str, cli: Cli, model: Path) -> None:
    one_line(cli("generate", str(model), *(words if len(words) > 2 else [*words, "the"])), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": {}}, "model_type"),
        ({"rope_theta": "zzz"}, "wrong kind"),
        ({"rope_theta": -3}, "must be above 0"),
        ({"rms_norm_eps": -3}, "must be above 0"),
        ({"head_dim": 10**30}, "integer"),
        ({"num_hidden_layers": 10**30}, "num_layers"),
        ({"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": None}, "config.json"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}},
            "factors",
        ),
    ],
)
def test_config_json_refused(changes: dict[str, object], expected: str, cli: Cli, model: Path) -> None:
    edit(model, **changes)
    ran = cli("generate", str(model), "the")
    assert ran.code == 2 and ran.err.count("\n") == 1, ran.err
    assert expected in ran.err


def test_weights_that_are_no_numbers(cli: Cli, model: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors")
    one_line(cli("generate", str(model), "the", "--max-tokens", "4"), "logits are not numbers")


def test_a_tokenizer_with_more_ids_than_the_model(cli: Cli, model: Path, tmp_path: Path) -> None:
    big = train_tokenizer([f"word{i} and other{i}" for i in range(400)], 900)
    big.save(model)
    one_line(cli("generate", str(model), "the"), "its tokenizer ids up to")


def test_overwrite_replaces_models_only(cli: Cli, model: Path, tmp_path: Path) -> None:
    diary = tmp_path / "home folder"
    diary.mkdir()
    (diary / "diary.txt").write_text("dear diary")
    one_line(cli("convert", str(model), str(diary), "--overwrite"), "holds diary.txt, which is no part of a model")
    assert (diary / "diary.txt").read_text() == "dear diary"
    assert cli("convert", str(model), str(tmp_path / "copy")).code == 0
    assert cli("convert", str(model), str(tmp_path / "copy"), "--overwrite", "--shard-size", "20kB").code == 0
    assert cli("convert", str(model), str(tmp_path / "copy"), "--overwrite").code == 0, (
        "a sharded one can be replaced too"
    )


def test_exports_can_be_read_by_others(model: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in model.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(cli: Cli, tmp_path: Path) -> None:
    ran = cli("convert", "llama-3.1-405b", str(tmp_path / "x"), "--random-weights")
    one_line(ran, "llama-3.1-405b needs 1.62 TB for its weights")
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_written_is_said_before_weights_are_made(cli: Cli, tmp_path: Path) -> None:
    one_line(cli("convert", "falcon-180b", str(tmp_path / "x"), "--random-weights"), "is not supported")


def test_a_prompt_is_not_printed_before_an_error(cli: Cli, model: Path) -> None:
    ran = cli("generate", str(model), "the quick", "--max-tokens", "100000")
    assert ran.out == "" and ran.code == 2


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("verb", ["convert", "data prepare"])
def test_a_full_disk(verb: str, cli: Cli, model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        if verb == "convert":
            ran = cli("convert", "armillary-2m", str(disk / "m"), "--random-weights")
        else:
            (tmp_path / "text.txt").write_text("".join(f"{i * i}: the quick brown fox\n" for i in range(25_000)))
            line = ("data", "prepare", str(tmp_path / "text.txt"), "--out", str(disk / "d"), "--tokenizer", "300")
            ran = cli(*line, "--quiet")
        one_line(ran, "disk full while writing")
        assert not (disk / "m").exists() and not (disk / "d").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "armillary", *words],
        capture_output=True,
        text=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


def test_terminals_that_know_only_ascii() -> None:
    ran = run("hardware", "h100x64", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0 and "NVLink" in ran.stdout


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "armillary", "models", "--json"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("model.rope.scaling=yarn", "set rope.original_context"),
        ("model.rope.scaling=longrope", "rope.original_context"),
        ("model.rope.theta=-1", "must be above 0"),
        ("model.num_layers=100000000", "from 1 to 10,000"),
        ("model.nmae=gpt2", "did you mean name"),
        ("data.source=", "data.source"),
        ("data.source=/no/such/text", "/no/such/text"),
        ("train.batch_tokens=1.5", "whole number"),
    ],
)
def test_recipes_refused_by_a_dry_run(change: str, expected: str, cli: Cli, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nname = "armillary-2m"\n')
    ran = cli("train", str(recipe), "--dry-run", "--set", change)
    assert ran.code == 2 and ran.err.count("\n") == 1, ran.err
    assert expected in ran.err or expected.split(".")[-1] in ran.err, ran.err


def test_a_missing_device_leaves_no_run(cli: Cli, tmp_path: Path, home: object) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nname = "armillary-2m"\n')
    one_line(cli("train", str(recipe), "--device", "cuda:99"), "no cuda:99 on this machine")
    assert cli("runs", "--json").json == []
