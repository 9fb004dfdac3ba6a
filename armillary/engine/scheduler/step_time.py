"""The time of a step: an upper estimate from calibrated and measured steps on this device, and the roofline.

Upper estimate: steps are classified by their work in tokens: those computed, and attention as tokens that cost as
much. A class holds works of (2^(i-1), 2^i]. A step of work w takes at most as long as one of its class or of a larger
class. Where none was seen, it takes at most w/w' times as long as the largest step so far, of work w', because weights
are read once.

Roofline: weights and keys at the measured read bandwidth, or GEMMs and attention at the measured FLOP/s.

bytes   weights in GEMMs · itemsize + Σ context · KV bytes per token
FLOPs   2 · weights · tokens + 4 · heads · head_dim · layers · Σ query · context
"""

from dataclasses import dataclass

from armillary.engine.scheduler.decision import Decision, StepWork
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import kv_bytes_per_token, parameters
from armillary.spec.model import ModelConfig
from armillary.store.peaks import Peaks

_CLASSES = 48
_SLOW_S = 0.1  # longer steps are always measured, shorter ones only when `wanted`
_KEEP = 0.9  # decay of a class's slowest step with every faster one, so that a delayed step is forgotten


class StepTimes:
    """Slowest seconds by class of work. Written by the engine's thread, read by others."""

    def __init__(self, attention_tokens: float | None = None) -> None:
        """`attention_tokens` is the context at which attention costs as much as all the rest of a token."""
        self._attention = attention_tokens
        self._seconds = [0.0] * _CLASSES
        """per class; 0: none was seen. Of fixed length, so that another thread can read it at any time"""
        self.wanted = True  # whether the next step is measured, however short

    def took(self, decision: Decision, seconds: float) -> None:
        """A step has ended; cheap where it is not measured."""
        if (self.wanted or seconds > _SLOW_S) and not decision.empty:
            self.wanted = False
            self.learn(decision.work, seconds)

    def learn(self, work: StepWork, seconds: float) -> None:
        at = _class(self._tokens(work))
        self._seconds[at] = max(seconds, _KEEP * self._seconds[at])

    def _tokens(self, work: StepWork) -> float:
        """The work in tokens: those computed, and attention as tokens that cost as much."""
        attention_pairs = work.context_tokens + work.prefill_pairs
        return (
            work.prefill_tokens + work.decode_tokens + (attention_pairs / self._attention if self._attention else 0.0)
        )

    def most_seconds(self, work: StepWork) -> float | None:
        """Upper estimate of a step's seconds from the steps so far; None where there were none."""
        tokens = self._tokens(work)
        known = [(i, seconds * max(1.0, tokens / 2 ** (i - 1))) for i, seconds in enumerate(self._seconds) if seconds]
        as_large = [seconds for i, seconds in known if i >= _class(tokens)]
        return min(as_large) if as_large else known[-1][1] if known else None


def _class(work: float) -> int:
    """i such that 2^(i-1) < work ≤ 2^i, with work of one token or less in class 0."""
    return min(_CLASSES - 1, max(0, -int(-work // 1) - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class StepRoofline:
    """A model on a device."""

    weight_bytes: float  # read in every step
    kv_bytes: float  # per token, all layers
    token_flops: float
    pair_flops: float  # attention FLOPs per (query, key) pair, all layers
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: StepWork) -> float:
        """Sliding windows are not counted: layers that have one read less."""
        keys = work.context_tokens + work.prefill_past + work.prefill_tokens
        moved = self.weight_bytes + keys * self.kv_bytes
        tokens, attention_pairs = work.prefill_tokens + work.decode_tokens, work.context_tokens + work.prefill_pairs
        flops = tokens * self.token_flops + attention_pairs * self.pair_flops
        return max(moved / self.read_bytes_per_s, flops / self.flops_per_s)


def attention_dims(config: ModelConfig) -> int:
    """Dims of a key and a value as attention reads them; latents are both."""
    mla = config.mla
    return 2 * mla.kv_rank + mla.rope_dim if mla is not None else 2 * config.head_dim


def step_roofline(config: ModelConfig, peaks: Peaks | None, dtype: str) -> StepRoofline | None:
    """The roofline of this model, where the device's bandwidth and GEMMs were measured (`armillary bench ceilings`)."""
    read = peaks.best("read", "bytes_per_s") if peaks else None
    flops = peaks.best_gemm(dtype) if peaks else None
    if read is None or flops is None:
        return None
    weights, size = parameters(config).multiplied, size_of(dtype)
    return StepRoofline(
        weight_bytes=weights * size,
        kv_bytes=kv_bytes_per_token(config, 1) * size,
        token_flops=2.0 * weights,
        pair_flops=2.0 * config.heads * attention_dims(config) * config.num_layers,
        read_bytes_per_s=read,
        flops_per_s=flops,
    )
