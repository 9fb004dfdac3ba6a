"""Activation memory: bytes that the forward pass stores for the backward pass, per token and layer.

Stored are the inputs of norms and GEMMs; queries, keys, values and output of attention; and what the activation
function needs (after Korthikanti et al., arXiv 2205.05198, who count 34·hidden per token for a GPT layer with dropout;
without dropout and with flash attention the same sum is 32). Recompute stores less, unfused software more.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import FULL, SCHEDULES, SELECTIVE, Array, Layouts
from armillary.planning.training.eager_activations import ActivationBytes, eager_activation_bytes
from armillary.planning.training.fp8_fp4 import NARROW
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.delta_ops import CHUNK
from armillary.spec.model import LayerKind, ModelConfig

EAGER = 1.1
"""factor of unfused layers over the tensors counted: rotated copies, masks, allocator padding"""
QUANTISED = 1.4
"""factor of a 4-bit base, set on litgpt's QLoRA rows against its LoRA rows; its cause is not known"""
DROPPED_BYTES = 3.0
"""per element of an adapter's input behind dropout: the result in 16 bits, and a mask"""
IMBALANCE = 1.1
"""rows of the most loaded expert rank over the mean"""
SCORES_BYTES = 5
"""bytes per unfused attention score: input and output of softmax in 16 bits, and a mask"""
GPIPE, INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")


def activation_bytes(case: TrainCase, layouts: Layouts) -> ActivationBytes:
    """Bytes per token of the micro-batch and layer, after tensor parallelism; context parallelism shards the tokens.
    The last result is kept: every snapshot of a step asks for the same layouts."""
    known = case.last_activations
    if not known or known[0] is not layouts:
        known[:] = [layouts, _activation_bytes(case, layouts)]
    counts: ActivationBytes = known[1]
    return counts


def _activation_bytes(case: TrainCase, layouts: Layouts) -> ActivationBytes:
    eager = case.software.eager_layers
    each = eager_activation_bytes(case, layouts) if eager else _fused_or_eager(case, layouts)
    if case.lora is None:
        return each
    scale = 1.0 if eager else _factor(case, layouts)
    inner = 2.0 * case.lora.inner / case.model.num_layers + _dropped(case)
    read = frozenset[str]() if case.software.adapter_dropout else case.lora.on  # adapters read what dropout wrote
    unread = _unread(case, layouts, read) if read is not None else np.zeros(len(layouts))
    return replace(
        each,
        no_recompute=each.no_recompute + scale * (inner - unread),
        selective=each.selective + scale * (inner - (0.0 if case.flash else unread)),
    )


def _fused_or_eager(case: TrainCase, layouts: Layouts) -> ActivationBytes:
    model, zero = case.model, np.zeros(len(layouts))
    full, selective, gradients = zero, zero, zero
    for kind, count in Counter(model.layers).items():
        share = count / model.num_layers
        attention, attention_less = _MIXERS.get(kind.attention, _attention)(case, layouts)
        mlp, mlp_less = _mlp(case, kind, layouts)
        total = attention + mlp + _norms(case, layouts)
        full = full + share * total
        selective = selective + share * (total - attention_less - (mlp_less if case.flash else 0.0))
        if case.software.fused_layers and case.software.fully_shard and not case.software.fused_blocks:
            selective = selective + share * 2.0 * model.hidden / layouts.stream_tp  # per operator, the last GEMM too
        if case.software.fused_blocks:
            less, more = _narrow(model, layouts)
            full, selective = full + share * (more - less), selective + share * more
        gradients = gradients + share * mlp / 2
    factor, wide = _factor(case, layouts), np.where(WIDE[layouts.precision], 2.0, 1.0)
    layer_input = 2.0 * model.hidden / layouts.stream_tp * wide
    return ActivationBytes(
        no_recompute=full * factor,
        selective=selective * factor,
        layer_input=layer_input,
        gradients=gradients * wide,
        recomputed=np.where(layouts.recompute == FULL, full * factor, 0.0),
        after_layers=2 * layer_input,
    )


def _narrow(model: ModelConfig, layouts: Layouts) -> tuple[Array, Array]:
    """Bytes that fused blocks save and add with fp8 GEMMs: outputs of norms and activations are stored transposed, in
    fp8; the output of attention in fp8 too, beside the copy that attention itself stores."""
    narrow = NARROW[layouts.precision]
    saved: Array = narrow * (2.0 * model.hidden + model.ffn)
    return saved, narrow * float(model.heads * model.head_dim)


def _factor(case: TrainCase, layouts: Layouts) -> Array:
    """Factor on what is counted in 16 bits: wider dtypes, unfused operations, 4-bit frozen weights."""
    quantised = QUANTISED if case.lora is not None and case.lora.base_bytes < 2 else 1.0
    return np.where(WIDE[layouts.precision], 2.0, 1.0) * (1.0 if case.software.fused_layers else EAGER) * quantised


def _unread(case: TrainCase, layouts: Layouts, on: frozenset[str]) -> Array:
    """Inputs of frozen matrices without adapters, which the backward pass does not read."""
    model, dense = case.model, 1 - case.model.num_moe_layers / case.model.num_layers
    first = {"qkv"} if model.mla is None else {"kv_down", "q" if model.mla.q_rank is None else "q_down"}
    hidden = 2.0 * model.hidden / layouts.stream_tp * (on.isdisjoint(first) + ("up" not in on) * dense)
    inner: Array = 2.0 * model.ffn / layouts.tp * ("down" not in on) * dense
    return hidden + inner


def _dropped(case: TrainCase) -> float:
    """Bytes per token and layer of dropout in front of adapters: one for queries, keys and values, and where every
    matrix has one, of gate and up too."""
    model = case.model
    if not case.software.adapter_dropout:
        return 0.0
    everywhere = case.lora is not None and case.lora.on is None
    further = model.heads * model.head_dim + model.ffn + model.hidden * (1 + model.gated)
    return DROPPED_BYTES * (model.hidden + (further if everywhere else 0))


def _norms(case: TrainCase, layouts: Layouts) -> Array:
    """Inputs of the norms; an unfused RMSNorm stores an fp32 copy."""
    model = case.model
    number = {"before": 1 if model.parallel == "one_norm" else 2, "after": 2, "both": 4}[model.norm_at]
    each = 4.0 if model.norm == "rms" and not case.software.fused_layers else 2.0
    return number * each * model.hidden / layouts.stream_tp


def _attention(case: TrainCase, layouts: Layouts) -> tuple[Array, Array]:
    """(all bytes, those selective recompute does not store): input, queries, keys, values, output, row sums, scores,
    and queries and keys before their norm."""
    model = case.model
    inputs = 2.0 * model.hidden / layouts.stream_tp
    heads = 2.0 * _width(model) / layouts.tp + 4.0 * model.heads / layouts.tp
    latent = (model.mla.q_rank or 0) + model.mla.kv_rank if model.mla else 0
    scores = 0.0 if case.flash else SCORES_BYTES * model.heads * case.sequence / layouts.tp
    latents = 2.0 * latent / layouts.stream_tp
    normed = 2.0 * (model.heads + model.kv_heads) * model.head_dim / layouts.tp if model.qk_norm != "none" else 0.0
    less = inputs + normed if case.flash else scores
    return inputs + heads + latents + scores + normed, less * np.ones(len(layouts))


def _gated_delta(case: TrainCase, layouts: Layouts) -> tuple[Array, Array]:
    """The same of a gated delta-net layer: input and projection; then in fp32 the convolution's input and output, and
    per value head what the chunked form saves (three factors per pair of a chunk, five of a key's size, four of a
    value's)."""
    delta = case.model.gated_delta
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    projected = 2.0 * (delta.channels + 2 * values + 2 * delta.value_heads)
    per_head = 3 * CHUNK + 5 * delta.key_dim + 4 * delta.value_dim
    wide = 4.0 * (2 * delta.channels + delta.value_heads * per_head)
    inputs = 2.0 * case.model.hidden / layouts.stream_tp
    return inputs + (projected + wide) / layouts.tp, inputs * np.ones(len(layouts))


def _simplicial(case: TrainCase, layouts: Layouts) -> tuple[Array, Array]:
    """The same of a 2-simplicial layer: two keys and two values per KV head, never the logits, and the row sums of its
    softmax."""
    model = case.model
    inputs = 2.0 * model.hidden / layouts.stream_tp
    heads = 2.0 * (2 * model.heads + 4 * model.kv_heads) * model.head_dim + 4.0 * model.heads
    normed = 2.0 * (model.heads + 2 * model.kv_heads) * model.head_dim if model.qk_norm != "none" else 0.0
    less = inputs + normed / layouts.tp
    return less + heads / layouts.tp, less


_MIXERS = {"gated_delta": _gated_delta, "2-simplicial": _simplicial}


def _width(model: ModelConfig) -> int:
    """Elements per token of queries, keys, values and attention's output."""
    if model.mla:
        query = model.heads * (model.mla.nope_dim + model.mla.rope_dim)
        return 2 * query + 2 * model.heads * model.mla.v_dim
    return 2 * (model.heads + model.kv_heads) * model.head_dim


def _mlp(case: TrainCase, kind: LayerKind, layouts: Layouts) -> tuple[Array, Array]:
    """(all bytes, those selective recompute does not store): input, input and output of the activation function."""
    model, moe = case.model, case.model.moe
    inputs = 2.0 * model.hidden / layouts.stream_tp
    if kind.mlp == "dense" or moe is None:
        inner, out = _inner(case, model.ffn, gated=model.gated)
        return inputs + inner / layouts.tp, inputs + out / layouts.tp
    inner, out = _inner(case, moe.ffn, gated=True)
    rows = moe.top_k * np.where(layouts.ep > 1, IMBALANCE, 1.0) / layouts.tp
    routed = rows * (4.0 * model.hidden + inner) + 4.0 * moe.num_experts / layouts.stream_tp
    shared, shared_out = _inner(case, moe.shared_ffn, gated=True)
    less = inputs + rows * (2.0 * model.hidden + out) + shared_out / layouts.tp
    return inputs + routed + shared / layouts.tp, less


def _inner(case: TrainCase, ffn: int, *, gated: bool) -> tuple[float, float]:
    """(bytes stored inside an MLP, of them those that the activation function writes)."""
    apart = 2.0 * ffn if gated and not case.software.fused_layers else 0.0
    return 2.0 * ffn * (1 + gated) + 2.0 * ffn + apart, 2.0 * ffn + apart


def micro_batches_in_flight(layouts: Layouts, micro_batches: Array) -> Array:
    """Micro-batches whose activations the first stage stores: all (GPipe), p (1F1B, zero-bubble), p + (p−1)/v
    (interleaved: Narayanan et al., SC21)."""
    limit = np.where(layouts.schedule == INTERLEAVED, layouts.pp + (layouts.pp - 1) / layouts.interleave, layouts.pp)
    limit = np.where(layouts.schedule == GPIPE, micro_batches, limit)
    return np.where(layouts.pp == 1, 1.0, np.minimum(limit, micro_batches))


def stored_bytes(case: TrainCase, layouts: Layouts, layers: Array, in_flight: Array) -> Array:
    """Bytes of `layers` layers and `in_flight` micro-batches between forward and backward pass, after recompute."""
    return layers * in_flight * stored_layer_bytes(case, layouts) + top_bytes(case, layouts)


def top_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes stored above the last layer."""
    return case.tokens(layouts) * activation_bytes(case, layouts).after_layers


def stored_layer_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes per layer and micro-batch, averaged over layers with and without recompute."""
    each = activation_bytes(case, layouts)
    share = 1.0 / layouts.recompute_every
    full = each.no_recompute
    per_layer = np.select(
        [layouts.recompute == FULL, layouts.recompute == SELECTIVE],
        [share * each.layer_input + (1 - share) * full, share * each.selective + (1 - share) * full],
        full,
    )
    return case.tokens(layouts) * per_layer


def layer_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes inside the first layer during its backward pass: what it recomputes, and its gradients."""
    each = activation_bytes(case, layouts)
    return case.tokens(layouts) * (each.recomputed + each.gradients)


def last_layer_bytes(case: TrainCase, layouts: Layouts, layers: Array) -> Array:
    """Bytes inside the last layers during their backward pass. Where one layer in some recomputes, the layers after the
    last of those have freed their activations by the time it recomputes."""
    each = activation_bytes(case, layouts)
    after = (np.ceil(layers) - 1) % layouts.recompute_every
    recomputed = np.maximum(each.recomputed - after * each.no_recompute, 0.0)
    return case.tokens(layouts) * (recomputed + each.gradients)
