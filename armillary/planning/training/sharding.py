"""How tensor, context and expert parallelism cut each operation: one table, read by time and memory alike.

column: the product's outputs are shared out; row: its inputs; heads: the work is; stream: rows of the residual stream
(only with sequence parallelism); experts: routed rows and weights; all are cut by context parallelism as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from armillary.planning.device_model.layout_arrays import Array, Layouts
from armillary.spec.arithmetic.ops import Op

Cut = Literal["column", "row", "heads", "stream", "experts", "whole"]

CUTS: dict[str, Cut] = {
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
"""operation -> cut; what is not listed (norms, adds, router, low-rank down projections, embedding) is on the stream"""
LOW_PRECISION_NEVER = ("head", "moe.router", "shared.gate")
"""products that stay in bf16 when the rest runs in 8 or 4 bits (Micikevicius et al., arXiv 2209.05433)"""


def cut_of(name: str) -> Cut:
    return CUTS.get(name, "stream")


def share(cut: Cut, layouts: Layouts) -> Array:
    """Of the work of an operation, what one device does."""
    if cut == "experts":  # rows are spread evenly, whatever ep: each device gets as many as its own tokens make
        return 1.0 / (layouts.cp * layouts.tp)
    if cut == "stream":
        return 1.0 / (layouts.cp * layouts.stream_tp)
    if cut == "whole":
        return 1.0 / layouts.cp
    return 1.0 / (layouts.cp * layouts.tp)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product as one device sees it: groups × [m, k] @ [k, n]."""

    groups: Array
    m: Array
    n: Array
    k: Array

    @property
    def flops(self) -> Array:
        return 2.0 * self.groups * self.m * self.n * self.k


def product(op: Op, layouts: Layouts, experts: int = 0) -> Product:
    """The forward product of `op` after the cut; `experts` is how many share a grouped one."""
    _, m, n, k = (np.full(len(layouts), float(size)) for size in op.shape)
    groups, cut = np.ones(len(layouts)), cut_of(op.name)
    if cut == "experts":
        rows = op.flops / (2.0 * n * k)
        local = np.maximum(experts / layouts.ep, 1.0)
        pieces = layouts.expert_tp
        mine = rows / (layouts.cp * layouts.tp) * pieces
        n, k = (n / pieces, k) if op.name.endswith("gate_up") else (n, k / pieces)
        return Product(groups=local, m=mine / local, n=n, k=k)
    if cut == "column":
        n = n / layouts.tp
    elif cut == "row":
        k = k / layouts.tp
    rows_cut = layouts.stream_tp if cut == "stream" else 1
    return Product(groups=groups, m=m / layouts.cp / rows_cut, n=n, k=k)
