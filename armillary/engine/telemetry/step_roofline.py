"""Roofline of a step: weights and keys at the measured read bandwidth, or GEMMs and attention at the measured FLOP/s.

bytes   weights in GEMMs · itemsize + Σ context · KV bytes per token
FLOPs   2 · weights · tokens + 4 · heads · head_dim · layers · Σ query · context
"""

from dataclasses import dataclass

from armillary.engine.scheduler.decision import StepWork
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import ModelConfig
from armillary.store.peaks import Peaks


@dataclass(frozen=True, kw_only=True)
class StepRoofline:
    """A model on a device."""

    weight_bytes: float
    """read in every step"""
    kv_bytes: float
    """per token, all layers"""
    token_flops: float
    """GEMM FLOPs per token"""
    pair_flops: float
    """attention FLOPs per (query, key) pair, all layers"""
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: StepWork) -> float:
        """Sliding windows are not counted: layers that have one read less."""
        keys = work.context_tokens + work.prefill_past + work.prefill_tokens
        moved = self.weight_bytes + keys * self.kv_bytes
        tokens, pairs = work.prefill_tokens + work.decode_tokens, work.context_tokens + work.prefill_pairs
        flops = tokens * self.token_flops + pairs * self.pair_flops
        return max(moved / self.read_bytes_per_s, flops / self.flops_per_s)


def step_roofline(config: ModelConfig, peaks: Peaks | None, dtype: str) -> StepRoofline | None:
    """The roofline of this model, where the device's bandwidth and GEMMs were measured (`armillary bench ceilings`)."""
    read = peaks.best("read", "bytes_per_s") if peaks else None
    flops = peaks.best_gemm(dtype) if peaks else None
    if read is None or flops is None:
        return None
    weights, size = parameters(config).multiplied, size_of(dtype)
    return StepRoofline(
        weight_bytes=weights * size,
        kv_bytes=2 * config.num_layers * config.kv_heads * config.head_dim * size,
        token_flops=2.0 * weights,
        pair_flops=4.0 * config.heads * config.head_dim * config.num_layers,
        read_bytes_per_s=read,
        flops_per_s=flops,
    )
