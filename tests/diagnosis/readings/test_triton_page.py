"""A metrics page of Triton with the TensorRT-LLM backend, in the format that its documentation shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.readings.metrics_page import is_page, reading_of_page
from armillary.store.home import Home


def page(*, running: int, waiting: int, used: float, requests: int = 400, seconds: float = 30.0, out: int = 200) -> str:
    """An ensemble whose engine is one of its parts."""
    llm = 'model="tensorrt_llm",version="1"'
    spent = {"ensemble": seconds, "tensorrt_llm": 0.98 * seconds, "preprocessing": 0.002}
    lines = ["# HELP nv_inference_request_success Number of successful inference requests, all batch sizes"]
    for model, each in spent.items():
        lines.append(f'nv_inference_request_success{{model="{model}",version="1"}} {requests}')
        lines.append(f'nv_inference_request_duration_us{{model="{model}",version="1"}} {requests * each * 1e6:.0f}')
    kinds = {"active": running + waiting, "max": 256, "scheduled": running, "waiting": waiting}
    lines += [f'nv_trt_llm_request_metrics{{{llm},request_type="{kind}"}} {count}' for kind, count in kinds.items()]
    blocks = {"fraction": used, "max": 4096, "tokens_per": 64, "used": round(4096 * used)}
    lines += [
        f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}",{llm}}} {count}'
        for kind, count in blocks.items()
    ]
    for name, length in (("input", out // 4), ("output", out)):
        lines += [f"nv_llm_{name}_token_len_{part}{{{llm}}} {value}" for part, value in _parts(length, requests)]
    return "\n".join(lines) + "\n"


def _parts(length: int, count: int) -> tuple[tuple[str, int], ...]:
    return ("count", count), ("sum", length * count)


def test_what_the_page_tells() -> None:
    found = reading_of_page(page(running=32, waiting=96, used=0.3), source="page.txt")
    assert found.by == "triton"
    assert found.values["e2e_s"] == pytest.approx(30.0)  # of the ensemble, not of its parts together
    assert (found.get("running"), found.get("waiting"), found.get("requests_total")) == (32, 96, 400)
    assert found.get("kv_used_fraction") == pytest.approx(0.3)
    assert found.get("tpot_s") == pytest.approx(30.0 * 32 / 128 / 200)


def test_between_two_looks() -> None:
    before = page(running=4, waiting=0, used=0.1, requests=400, seconds=2.0)
    after = page(running=4, waiting=0, used=0.1, requests=800, seconds=4.0)
    found = reading_of_page(after, source="url", earlier=before, seconds=5.0)
    assert found.values["e2e_s"] == pytest.approx(6.0)  # 400 × 2 s before, 800 × 4 s in all


@pytest.mark.parametrize(
    ("running", "waiting", "used", "cause"),
    [(32, 96, 0.3, "too_few_replicas"), (32, 96, 0.97, "kv_pressure"), (32, 0, 0.4, None)],
)
def test_a_page_is_judged(tmp_path: Path, running: int, waiting: int, used: float, cause: str | None) -> None:
    """Without times of prompts a larger batch is taken to cost what it adds, so that a queue asks for replicas."""
    path = tmp_path / "page.txt"
    path.write_text(page(running=running, waiting=waiting, used=used))
    assert is_page(path)
    found = diagnose(reading_of_page(path.read_text(), source=str(path)), Home.at(tmp_path))
    assert found.cause == cause, found.headline
