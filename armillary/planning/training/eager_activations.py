"""Layers of plain torch operators, one after the other, as our trainer runs them on a CPU: what autograd keeps of each.

Counted from the operators, a token at a time: every one that needs its input or output for the backward pass holds it,
and a view holds all of what it looks into. Norms work in fp32 whatever the format of the products.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import FULL, NONE, SELECTIVE, Array, Layouts
from armillary.planning.training.train_case import TrainCase
from armillary.spec.model import LayerKind, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that one layer keeps a token (mean over kinds of layers), on one device."""

    whole: Array
    """without recomputation"""
    selective: Array
    """where norms and activation functions (unfused: the scores) are made again"""
    entry: Array
    """the layer's input alone, for full recomputation"""
    working: Array
    """gradients in flight inside one layer of the backward pass"""
    again: Array
    """what one layer makes again, at the moment it is differentiated"""
    top: Array
    """beyond all layers: the last norm and the hidden states that the loss reads"""


WIDE_BYTES = 4.0


def plain_kept(case: TrainCase, layouts: Layouts) -> Kept:
    """What a layer keeps a token of the micro-batch, after tensor parallelism."""
    model, h, frozen = case.model, np.where(WIDE[layouts.precision], 4.0, 2.0), case.lora is not None
    # autocast leaves the residual stream wide, unless the weights it begins with are narrow
    stream = h if frozen else np.where((layouts.zero > 0) & (layouts.dp > 1), h, WIDE_BYTES)
    hidden = model.hidden / layouts.stream_tp
    zero = np.zeros(len(layouts))
    whole, selective, working = zero, zero, zero
    for kind, count in Counter(model.layers).items():
        share = count / model.num_layers
        parts = _Layer(model, kind, layouts, h, frozen=frozen)
        whole = whole + share * (parts.norms(hidden) + parts.attention + parts.mlp)
        selective = selective + share * (stream * hidden + parts.products)
        working = working + share * parts.working
    norm = _norm_bytes(model, frozen=frozen)
    top = hidden * ((norm if model.final_norm else 0.0) + WIDE_BYTES) + np.where(h < WIDE_BYTES, h, 0.0) * model.hidden
    top = top + np.where(layouts.stream_tp > 1, h * model.hidden, 0.0)
    entry = stream * hidden
    less = np.select([layouts.recompute == FULL, layouts.recompute == SELECTIVE], [entry, selective], whole)
    gathered = 2 * h * (model.hidden - hidden)  # inputs of both cut parts, whole where tokens are cut
    again = np.where(layouts.recompute == NONE, 0.0, np.maximum(whole - less, 0.0) + gathered)
    return Kept(whole=whole, selective=selective, entry=entry, working=working, again=again, top=top)


class _Layer:
    """One kind of layer on every layout."""

    def __init__(self, model: ModelConfig, kind: LayerKind, layouts: Layouts, h: Array, *, frozen: bool) -> None:
        self.model, self.layouts, self.h, self.norm = model, layouts, h, _norm_bytes(model, frozen=frozen)
        self.q, self.k = model.heads * model.head_dim / layouts.tp, model.kv_heads * model.head_dim / layouts.tp
        self.rotates = model.positions == "rope" and kind.rope
        moe = model.moe if kind.mlp == "moe" else None
        self.ffn = model.ffn / layouts.tp if moe is None else (moe.top_k * moe.ffn + moe.shared_ffn) / layouts.tp
        self.gated = model.gated or moe is not None
        self.rows = moe.top_k if moe is not None else 1

    def norms(self, hidden: Array) -> Array:
        number = {"before": 1 if self.model.parallel == "one_norm" else 2, "after": 2, "both": 4}[self.model.norm_at]
        return number * self.norm * hidden

    @property
    def attention(self) -> Array:
        """Input, the fused projection (values look into it), turned queries and keys, output, row sums."""
        inputs = self.h * self.model.hidden / self.layouts.stream_tp
        turned = self.q + (self.k if self.rotates else 0.0)
        heads = self.h * ((self.q + 2 * self.k) + turned + self.q) + 4.0 * self.model.heads / self.layouts.tp
        normed = 0.0 if self.model.qk_norm == "none" else self.norm * (self.q + self.k)
        return inputs + heads + normed

    @property
    def mlp(self) -> Array:
        """Input (shared with attention's under one norm), gate and up apart, their activation, the product."""
        inputs = self.h * self.model.hidden / self.layouts.stream_tp * (self.model.parallel != "one_norm") * self.rows
        return inputs + self.h * self.ffn * (4 if self.gated else 2)

    @property
    def products(self) -> Array:
        """What selective recomputation keeps: results of products, of attention, and of exchanges."""
        model, layouts = self.model, self.layouts
        ups = self.ffn * (2 if self.gated else 1)
        out = 2.0 * model.hidden * (1 + np.where(layouts.tp > 1, 1.0 / layouts.stream_tp, 0.0))
        return self.h * (self.q + 2 * self.k + self.q + ups + out) + 4.0 * model.heads / layouts.tp

    @property
    def working(self) -> Array:
        """The MLP's backward pass: gradients of the product, of both its factors, and of the projection they are put
        together in, before what the forward pass kept of them is let go."""
        return self.h * self.ffn * (3 if self.gated else 2) + WIDE_BYTES * self.model.hidden / self.layouts.stream_tp


def _norm_bytes(model: ModelConfig, *, frozen: bool) -> float:
    """A number that is normed: as it comes in, and for RMSNorm before its weight, if that is trained."""
    return 2 * WIDE_BYTES if model.norm == "rms" and not frozen else WIDE_BYTES
