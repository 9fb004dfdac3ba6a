"""Activation memory of eager torch layers, as our trainer runs them on a CPU: what autograd stores per operator.

The counts are per token: every operator that needs its input or output in the backward pass stores it, and a view
stores the full tensor it belongs to. Norms run in fp32 whatever the dtype of the GEMMs.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import FULL, NONE, SELECTIVE, Array, Layouts
from armillary.planning.training.train_case import TrainCase
from armillary.spec.model import LayerKind, ModelConfig


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes stored per token and layer (mean over the kinds of layers) on one device, and bytes of gradients and of
    recomputed activations inside one layer during its backward pass."""

    no_recompute: Array
    selective: Array
    """with selective recompute of norms and activation functions (unfused: of the scores)"""
    layer_input: Array
    """the layer's input alone, for full recompute"""
    gradients: Array
    recomputed: Array
    after_layers: Array
    """after all layers: the last norm and the hidden states that the loss reads"""


WIDE_BYTES = 4.0


def eager_activation_bytes(case: TrainCase, layouts: Layouts) -> ActivationBytes:
    """Bytes per token of the micro-batch and layer, after tensor parallelism."""
    model, h, frozen = case.model, np.where(WIDE[layouts.precision], 4.0, 2.0), case.lora is not None
    # autocast keeps the residual stream in fp32, unless the weights it begins with are 16-bit
    stream = h if frozen else np.where((layouts.zero > 0) & (layouts.dp > 1), h, WIDE_BYTES)
    hidden = model.hidden / layouts.stream_tp
    zero = np.zeros(len(layouts))
    full, selective, gradients = zero, zero, zero
    for kind, count in Counter(model.layers).items():
        share = count / model.num_layers
        parts = _Layer(model, kind, layouts, h, frozen=frozen)
        full = full + share * (parts.norms(hidden) + parts.attention + parts.mlp)
        selective = selective + share * (stream * hidden + parts.gemm_outputs)
        gradients = gradients + share * parts.gradients
    after = hidden * ((_norm_bytes(model, frozen=frozen) if model.final_norm else 0.0) + WIDE_BYTES)
    after = after + np.where(h < WIDE_BYTES, h, 0.0) * model.hidden
    after = after + np.where(layouts.stream_tp > 1, h * model.hidden, 0.0)
    layer_input = stream * hidden
    stored = np.select([layouts.recompute == FULL, layouts.recompute == SELECTIVE], [layer_input, selective], full)
    gathered = 2 * h * (model.hidden - hidden)  # inputs of both tensor-parallel regions, all-gathered
    recomputed = np.where(layouts.recompute == NONE, 0.0, np.maximum(full - stored, 0.0) + gathered)
    return ActivationBytes(
        no_recompute=full,
        selective=selective,
        layer_input=layer_input,
        gradients=gradients,
        recomputed=recomputed,
        after_layers=after,
    )


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
        """Input, the fused projection (values are a view of it), rotated queries and keys, output, row sums."""
        inputs = self.h * self.model.hidden / self.layouts.stream_tp
        rotated = self.q + (self.k if self.rotates else 0.0)
        heads = self.h * ((self.q + 2 * self.k) + rotated + self.q) + 4.0 * self.model.heads / self.layouts.tp
        normed = 0.0 if self.model.qk_norm == "none" else self.norm * (self.q + self.k)
        return inputs + heads + normed

    @property
    def mlp(self) -> Array:
        """Input (shared with attention under a single norm), gate, up, activation, and their elementwise product."""
        inputs = self.h * self.model.hidden / self.layouts.stream_tp * (self.model.parallel != "one_norm") * self.rows
        return inputs + self.h * self.ffn * (4 if self.gated else 2)

    @property
    def gemm_outputs(self) -> Array:
        """What selective recompute stores: outputs of GEMMs, of attention and of collectives."""
        model, layouts = self.model, self.layouts
        ups = self.ffn * (2 if self.gated else 1)
        out = 2.0 * model.hidden * (1 + np.where(layouts.tp > 1, 1.0 / layouts.stream_tp, 0.0))
        return self.h * (self.q + 2 * self.k + self.q + ups + out) + 4.0 * model.heads / layouts.tp

    @property
    def gradients(self) -> Array:
        """Backward pass of the MLP: gradients of the elementwise product, of both its factors, and of the projection
        that joins them, before the stored activations are freed."""
        return self.h * self.ffn * (3 if self.gated else 2) + WIDE_BYTES * self.model.hidden / self.layouts.stream_tp


def _norm_bytes(model: ModelConfig, *, frozen: bool) -> float:
    """Bytes per normed element: its input in fp32, and for RMSNorm the value before its weight, if that is trained."""
    return 2 * WIDE_BYTES if model.norm == "rms" and not frozen else WIDE_BYTES
