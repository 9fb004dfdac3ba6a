"""Layout: the parallelism of a model over devices, and what each device stores.

Devices = dp × tp × pp × cp. Expert parallelism (ep) uses the same devices: dp × cp, with each expert sharded by tp like
a dense MLP; or, where ep only divides dp × cp × tp, all of these, with unsharded experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from armillary.errors import BadLayout

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallelism of the model over devices, and what each device stores."""

    dp: int = 1
    """data-parallel ranks (for serving: replicas)"""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, what dp ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP)"""
    shard: int | None = None
    """dp ranks that shard one copy (HSDP); none: all of dp"""
    tp: int = 1
    """tensor-parallel ranks, which shard heads and MLPs"""
    sequence_parallel: bool = True
    """tp ranks split the tokens between the tensor-parallel regions (training with tp > 1)"""
    pp: int = 1
    """pipeline stages; they may have different numbers of layers, and embedding and head may be chunks of their own"""
    interleave: int = 1
    """chunks of layers per stage"""
    schedule: Schedule = "1f1b"
    """order of micro-batches in the pipeline"""
    cp: int = 1
    """context-parallel ranks, which shard the sequence"""
    ep: int = 1
    """expert-parallel ranks, among dp × cp (or dp × cp × tp)"""
    micro_batch: int = 1
    """sequences per rank and micro-batch"""
    uneven: bool = False
    """dp need not divide the batch: ranks with a row less get a blank one, which counts nowhere (elastic runs; not with
    pp or experts)"""
    recompute: Recompute = "none"
    """what the backward pass recomputes: nothing; all but GEMMs and attention (selective); entire layers (full)"""
    recompute_every: int = 1
    """recompute one layer in this many"""
    precision: Precision = "auto"
    """dtype of the GEMMs; weights below fp32 have an fp32 master in training. auto: 16 bits where GEMM and attention
    are measured to be at least 1.15 × as fast as in fp32 (bf16; fp16 where only bf16 is emulated), else fp32"""
    fp8_scaling: Literal["token", "tensor", "row"] = "token"
    """with precision fp8: per-token scales (fastest), one per tensor, or per row in both directions (finest)"""
    offload: Literal["none", "optimizer", "activations", "both", "nvme"] = "none"
    """what is offloaded to host memory (nvme: optimizer states to disk)"""
    bucket_bytes: int = 25_000_000
    """bytes of gradients reduced together"""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "interleave", "cp", "ep", "micro_batch", "recompute_every", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise BadLayout(f"layout.{name}={getattr(self, name)} must be at least 1; try --set layout.{name}=1")
        if self.shard is not None and self.shard < 1:
            raise BadLayout(f"layout.shard={self.shard} must be at least 1; try --set layout.shard=none")
        if self.zero not in (0, 1, 2, 3):
            raise BadLayout(f"layout.zero={self.zero} is not a stage; try --set layout.zero=3")

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shard_size(self) -> int:
        """Ranks that shard one copy of what `zero` shards."""
        return (self.shard or self.dp) if self.zero else 1

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are separate passes (zero-bubble)."""
        return self.pp > 1 and self.schedule == "zero_bubble"

    @property
    def expert_tp(self) -> int:
        """Shards per expert by tp."""
        return self.tp if (self.dp * self.cp) % self.ep == 0 else 1

    def num_micro_batches(self, batch_tokens: int, sequence: int) -> int:
        """Micro-batches per rank and step (gradient accumulation); the last may have fewer rows where `uneven`."""
        return -(-batch_tokens // (sequence * self.micro_batch * self.dp))

    def on_devices(self, num_devices: int) -> Layout:
        """The same layout with the dp that fills `num_devices`."""
        inner = self.num_devices // self.dp
        if num_devices % inner or num_devices < inner:
            raise BadLayout(self.leaves_over(num_devices))
        return replace(self, dp=num_devices // inner)

    def leaves_over(self, num_devices: int) -> str:
        """That no dp fills `num_devices`, and the one axis whose reduction would allow it."""
        inner = self.num_devices // self.dp
        options = [
            f"try --set layout.{axis}={less}"
            for axis in ("pp", "cp", "tp")
            for less in range(getattr(self, axis) - 1, 0, -1)
            if num_devices % (inner // getattr(self, axis) * less) == 0
        ]
        best = next((option for option in options if not option.endswith("=1")), next(iter(options), ""))
        near = f"use {max(inner, num_devices - num_devices % inner)}"
        return f"{num_devices} devices are not a multiple of {self.text('tp', 'pp', 'cp')}; " + (
            f"{near}, or {best}" if best else near
        )

    def text(self, *axes: str) -> str:
        """The axes in use: 'tp=4 × pp=4'."""
        sizes = {axis: getattr(self, axis) for axis in axes or ("dp", "tp", "pp", "cp")}
        return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"
