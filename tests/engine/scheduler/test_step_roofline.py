"""The roofline of a step: a decode reads weights, a long prompt computes."""

from __future__ import annotations

import pytest

from armillary.engine.scheduler.decision import Decision, PrefillChunk
from armillary.engine.scheduler.step_time import step_roofline
from armillary.spec.arithmetic.params import parameters
from armillary.spec.catalogue import models
from armillary.store.peaks import Peaks


def test_a_decode_is_bound_by_bytes_and_a_prompt_by_products() -> None:
    points = {
        "read": ({"bytes": 1 << 30, "bytes_per_s": 4e12},),
        "gemm": ({"m": 1, "n": 1, "k": 1, "dtype": "bf16", "flops": 7e14},),
    }
    config = models()["qwen3-8b"].config
    roofline = step_roofline(config, Peaks(device="x", date="2026-01-01", points=points), "bf16")
    assert roofline is not None
    decode = Decision(1)
    decode.positions = [127]
    decode.decodes = [None]  # type: ignore[list-item]
    weights = parameters(config).multiplied
    assert roofline.seconds(decode.work) == pytest.approx((2 * weights + 128 * roofline.kv_bytes) / 4e12)
    prompt = Decision(2)
    prompt.chunks = [PrefillChunk(None, 0, 0, 8192, True)]  # type: ignore[arg-type]
    assert roofline.seconds(prompt.work) >= 2 * weights * 8192 / 7e14
    assert step_roofline(config, None, "bf16") is None
