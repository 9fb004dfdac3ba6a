"""How tensor, context and expert parallelism shard each operation: one table for time and memory.

column: the outputs of the GEMM are sharded; row: its inputs; heads: its work; stream: the tokens of the residual stream
(only with sequence parallelism); experts: routed tokens and weights. Context parallelism shards all of them as well.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array, Layouts
from armillary.spec.arithmetic.ops import Op

Sharding = Literal["column", "row", "heads", "stream", "experts"]

SHARDINGS: dict[str, Sharding] = {
    "qkv": "column",
    "q": "column",
    "kv_up": "column",
    "head": "column",
    "mlp.gate_up": "column",
    "mlp.up": "column",
    "shared.gate_up": "column",
    "out": "row",
    "mlp.down": "row",
    "shared.down": "row",
    "rope": "heads",
    "qk_norm": "heads",
    "attention": "heads",
    "mlp.act": "heads",
    "shared.act": "heads",
    "loss": "heads",
    "moe.gate_up": "experts",
    "moe.down": "experts",
    "moe.act": "experts",
    "moe.dispatch": "experts",
    "moe.combine": "experts",
}
"""operation -> sharding; what is not listed (norms, adds, router, low-rank down projections, embedding) is on the
stream"""
LOW_PRECISION_NEVER = ("head", "moe.router", "shared.gate")
"""GEMMs that stay in bf16 when the others run in 8 or 4 bits (Micikevicius et al., arXiv 2209.05433)"""


def sharding_of(name: str) -> Sharding:
    return SHARDINGS.get(name, "stream")


def share(sharding: Sharding, layouts: Layouts) -> Array:
    """Share of an operation's work on one device. Routed tokens are balanced: a device gets as many rows as its own
    tokens produce, whatever ep is."""
    return 1.0 / (layouts.cp * (layouts.stream_tp if sharding == "stream" else layouts.tp))


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A GEMM as one device runs it: groups × [m, k] @ [k, n]."""

    groups: Array
    m: Array
    n: Array
    k: Array

    @property
    def flops(self) -> Array:
        return 2.0 * self.groups * self.m * self.n * self.k


def local_gemm(op: Op, layouts: Layouts, experts: int = 0) -> Gemm:
    """The forward GEMM of `op` after sharding; `experts` is the number of groups of a grouped GEMM."""
    sizes: list[Array] = [np.full(len(layouts), size, dtype=float) for size in op.shape]
    _, m, n, k = sizes
    sharding = sharding_of(op.name)
    if sharding == "experts":
        local, shards = np.maximum(experts / layouts.ep, 1.0), layouts.expert_tp
        rows = op.flops / (2.0 * n * k) / (layouts.cp * layouts.tp) * shards
        n, k = (n / shards, k) if op.name.endswith("gate_up") else (n, k / shards)
        return Gemm(groups=local, m=rows / local, n=n, k=k)
    if sharding == "column":
        n = n / layouts.tp
    elif sharding == "row":
        k = k / layouts.tp
    tokens = layouts.cp * (layouts.stream_tp if sharding == "stream" else 1)
    return Gemm(groups=np.ones(len(layouts)), m=m / tokens, n=n, k=k)
