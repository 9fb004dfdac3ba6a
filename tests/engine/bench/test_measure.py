"""Measuring an engine: every token is counted, and the public workload is the public one."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from armillary.engine.bench.bench import bench_serve
from armillary.engine.bench.bench_page import bench_page, picture
from armillary.engine.bench.measure import decode_bytes, fixed, nano_vllm, ragged, serve_all
from armillary.engine.build import make_engine
from armillary.model.transformer import build
from armillary.spec.model import LayerKind, MoE
from armillary.spec.tables.serve import Serve
from armillary.stats import percentile
from tests.conftest import Ran
from tests.model.layers.test_attention_forms import small


def test_the_public_workload_is_the_published_one() -> None:
    requests = nano_vllm()
    assert len(requests) == 256 and sum(r.params.max_tokens or 0 for r in requests) == 133_966
    assert all(100 <= len(r.prompt) <= 1024 and r.params.ignore_eos for r in requests)


def test_every_token_is_counted() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    engine, _ = make_engine(model, None, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), seed=0)
    requests = ragged(6, most_in=20, most_out=9, vocab=50)
    found = serve_all(engine, requests, name="r")
    assert found.requests == 6 and found.tokens_in == sum(len(r.prompt) for r in requests)
    assert found.tokens_out == sum(r.params.max_tokens or 0 for r in requests)
    assert 0 < found.ttft_p50_s <= found.ttft_p99_s <= found.seconds and found.steps >= 9
    assert found.tokens_per_s == pytest.approx(found.tokens_out / found.seconds)


def test_modes_are_compared_on_the_same_requests() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    serve = Serve(block_tokens=4, kv_bytes=400_000, max_running=4)
    found = bench_serve(model, serve, requests=24, tokens_in=12, tokens_out=24)
    assert [mode.name for mode in found.modes] == ["none", "static", "dynamic", "continuous"]
    assert len({mode.tokens_out for mode in found.modes}) == 1 and found.single.tokens_out == 24
    none, static, dynamic, continuous = (mode.steps for mode in found.modes)
    assert none > static > dynamic > continuous  # by what they are: no clock decides it
    assert bench_page(found).split("on-narrow")[-1].count("<rect") == 4 and ElementTree.fromstring(
        picture(found)
    ).tag.endswith("svg")


def test_bytes_of_a_decode_count_the_chosen_experts() -> None:
    moe = MoE(num_experts=8, top_k=2, ffn=16)
    model = build(small(moe=moe, layers=(LayerKind(mlp="moe"),)), dtype=torch.float32, device="cpu", seed=3)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) * 4
    assert decode_bytes(model, 0, batch=1000) - decode_bytes(model, 0) == pytest.approx(0.75 * experts)


def test_bytes_of_a_decode_leave_the_input_embedding_out() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    config = model.config
    per_token = 2 * 2 * config.kv_heads * config.head_dim * 4
    assert decode_bytes(model, 10) - decode_bytes(model, 0) == 10 * per_token
    weights = sum(p.numel() for p in model.parameters()) * 4
    embedding = 0 if config.tied else config.vocab * config.hidden * 4
    assert decode_bytes(model, 0) == weights - embedding
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([], 99) == 0.0
    assert len(fixed(2, tokens_in=3, tokens_out=1, vocab=9)) == 2


def test_bench_serve_on_the_command_line(cli: object, tmp_path: Path) -> None:
    line = (
        "bench",
        "serve",
        "armillary-2m",
        "--requests",
        "3",
        "--tokens-in",
        "8",
        "--tokens-out",
        "4",
        "--device",
        "cpu",
        "--mode",
        "continuous",
        "--plot",
        str(tmp_path / "p.html"),
        "--json",
    )
    ran: Ran = cli(*line)  # type: ignore[operator]
    assert ran.json["modes"][0]["tokens_per_s"] > 0 and "<rect" in (tmp_path / "p.html").read_text()
    said = cli("diagnose", ran.json["run"], "--json").json  # type: ignore[operator]
    assert said["kind"] == "serving", said
    assert "no batching mode" in cli("bench", "serve", "armillary-2m", "--mode", "x").err  # type: ignore[operator]
