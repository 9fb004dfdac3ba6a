"""Samples: what calls and micro-batches take this processor at this moment, timed beside steps that nobody looks at.

Cores are now quick and now slow, whatever else they are asked to do: what follows the number of calls, or that of
micro-batches, can only be held against steps of the same moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from armillary.model.layers import attention_forms as attend
from armillary.model.transformer import build
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.data.loader import DeviceBatch
from armillary.training.step.loss import loss_sum
from armillary.training.step.numerics import HALF, autocast
from armillary.training.telemetry.micro_batch_cost import JoinedRows

EARLY = range(4, 24)
"""of the steps this process takes: those beside which samples are timed if they are plain, however short the run"""
EARLY_S, MOST = 3.0, 0.02
"""seconds that these may take in all: after that one more is not worth them, and the share of a run that later ones may
take"""
HALF_CALLS, WIDE_CALLS = 408, 326
"""calls of torch in one small layer, as the profiler counts those of a step: in a half format, and in fp32"""
_CPU = torch.device("cpu")


class Samples:
    """`beside(batch, step, taken)` once a plain step is over."""

    def __init__(self, every: int, precision: str, joined: JoinedRows | None) -> None:
        """`every` so many steps one is recorded, and samples are timed after it; 0: never. Every rank times its own, so
        that none waits for another."""
        self._every, self._precision, self._joined = every, precision, joined
        self._call_s: Callable[[], float] | None = None
        self._spent_s, self._since = 0.0, time.perf_counter()

    def beside(self, batch: DeviceBatch, step: int, taken: int) -> dict[str, float]:
        """Gauges, after step `step` of `batch`, before which this process took `taken`; none where it is not their
        turn: early on, and after every step that was recorded."""
        early = taken in EARLY and self._spent_s < EARLY_S
        begin = time.perf_counter()
        later = step and step % (self._every or 1) == 0 and self._spent_s < MOST * (begin - self._since)
        if not self._every or not (early or later):
            return {}
        self._call_s = self._call_s or call_sample(self._precision)
        found, fraction = (
            {"torch_call_s": self._call_s()},
            self._joined.fraction(batch) if self._joined is not None else None,
        )
        self._spent_s += time.perf_counter() - begin
        return found if fraction is None else found | {"micro_batch_overhead_fraction": fraction}


def call_sample(precision: str) -> Callable[[], float]:
    """Times one small layer over four tokens, forward and backward: every call that a block makes, and next to nothing
    to compute. A pass before it brings it back to the caches, where the calls of a step are too."""
    config = ModelConfig(
        hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=192, vocab=64, context=4, layers=(LayerKind(),)
    )
    model = build(config, dtype=torch.float32, device=_CPU, seed=0)
    tokens_BT, calls = torch.arange(4, device=_CPU)[None], HALF_CALLS if precision in HALF else WIDE_CALLS

    def passed() -> None:
        with autocast(precision, _CPU):
            loss = loss_sum(model, model(tokens_BT, tokens_BT, attend.plain), tokens_BT, chunk=0)
        loss.backward()  # type: ignore[no-untyped-call]

    def seconds() -> float:
        passed()
        begin = time.thread_time()
        passed()
        return (time.thread_time() - begin) / calls

    return seconds
