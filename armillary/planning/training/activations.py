"""Activations: bytes that the forward pass keeps for the backward pass, a token and layer at a time.

Kept are the inputs of norms and products, queries, keys, values and output of attention, and what the activation
function needs (after Korthikanti et al., arXiv 2205.05198, who count 34·hidden a token for a GPT layer with dropout;
without dropout and with fused attention the same sum is 32). Recomputation keeps less, unfused software more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import FULL, SCHEDULES, SELECTIVE, Array, Layouts
from armillary.planning.training.eager_activations import Kept, plain_kept
from armillary.planning.training.fp8_fp4 import NARROW
from armillary.planning.training.train_case import TrainCase
from armillary.spec.model import LayerKind, ModelConfig

EAGER = 1.1
"""unfused layers keep about this much more than the tensors counted: rotated copies, masks, padding of the allocator"""
QUANTISED = 1.4
"""a base in 4 bits keeps the inputs of frozen products too (bitsandbytes; litgpt's QLoRA rows against its LoRA rows)"""
IMBALANCE = 1.1
"""rows of the fullest expert rank over the mean"""
SCORES_BYTES = 5
"""of an unfused attention score: softmax's input and output in 16 bits, and a mask"""
GPIPE, INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")


def kept(case: TrainCase, layouts: Layouts) -> Kept:
    """What a layer keeps a token of the micro-batch, after tensor parallelism; context parallelism cuts the tokens."""
    plain = case.software.plain_layers
    each = plain_kept(case, layouts) if plain else _fused_or_eager(case, layouts)
    if case.lora is None or case.lora.on is None:
        return each
    scale = 1.0 if plain else _factor(case, layouts)
    inner, unread = 2.0 * case.lora.inner / case.model.num_layers, _unread(case, layouts, case.lora.on)
    return replace(
        each,
        whole=each.whole + scale * (inner - unread),
        selective=each.selective + scale * (inner - (0.0 if case.flash else unread)),
    )


def _fused_or_eager(case: TrainCase, layouts: Layouts) -> Kept:
    model, zero = case.model, np.zeros(len(layouts))
    whole, selective, working = zero, zero, zero
    for kind, count in Counter(model.layers).items():
        share = count / model.num_layers
        attention, attention_less = _attention(case, layouts)
        mlp, mlp_less = _mlp(case, kind, layouts)
        norms = _norms(case, layouts)
        total = attention + mlp + norms
        whole = whole + share * total
        selective = selective + share * (total - attention_less - (mlp_less if case.flash else 0.0))
        if case.software.fused_layers and case.software.fully_shard and not case.software.whole_blocks:
            selective = selective + share * 2.0 * model.hidden / layouts.stream_tp  # by operator, the last product too
        if case.software.whole_blocks:
            less, more = _narrow(model, layouts)
            whole, selective = whole + share * (more - less), selective + share * more
        working = working + share * mlp / 2
    factor, wide = _factor(case, layouts), np.where(WIDE[layouts.precision], 2.0, 1.0)
    entry = 2.0 * model.hidden / layouts.stream_tp * wide
    again = np.where(layouts.recompute == FULL, whole * factor, 0.0)
    return Kept(
        whole=whole * factor,
        selective=selective * factor,
        entry=entry,
        working=working * wide,
        again=again,
        top=2 * entry,
    )


def _narrow(model: ModelConfig, layouts: Layouts) -> tuple[Array, Array]:
    """Bytes that our blocks save and take with fp8 products: what norms and activations give is kept transposed, in
    fp8; attention's output in fp8 too, beside that which attention itself keeps."""
    narrow = NARROW[layouts.precision]
    made: Array = narrow * (2.0 * model.hidden + model.ffn)
    return made, narrow * float(model.heads * model.head_dim)


def _factor(case: TrainCase, layouts: Layouts) -> Array:
    """On what is counted in 16 bits: wider formats, unfused operations, frozen weights in few bits."""
    wide = np.where(WIDE[layouts.precision], 2.0, 1.0)
    return wide * (1.0 if case.software.fused_layers else EAGER) * _quantised(case)


def _unread(case: TrainCase, layouts: Layouts, on: frozenset[str]) -> Array:
    """Inputs of frozen matrices without adapters, which nothing in the backward pass reads."""
    model, dense = case.model, 1 - case.model.num_moe_layers / case.model.num_layers
    hidden = 2.0 * model.hidden / layouts.stream_tp * (("qkv" not in on) + ("up" not in on) * dense)
    inner: Array = 2.0 * model.ffn / layouts.tp * ("down" not in on) * dense
    return hidden + inner


def _quantised(case: TrainCase) -> float:
    return QUANTISED if case.lora is not None and case.lora.base_bytes < 2 else 1.0


def _norms(case: TrainCase, layouts: Layouts) -> Array:
    """Inputs of the norms; RMSNorm outside a fused kernel keeps an fp32 copy."""
    model = case.model
    number = {"before": 1 if model.parallel == "one_norm" else 2, "after": 2, "both": 4}[model.norm_at]
    each = 4.0 if model.norm == "rms" and not case.software.fused_layers else 2.0
    return number * each * model.hidden / layouts.stream_tp


def _attention(case: TrainCase, layouts: Layouts) -> tuple[Array, Array]:
    """(all of it, what selective recomputation leaves out): input, queries, keys, values, output, row sums, scores, and
    queries and keys before they are normed."""
    model = case.model
    inputs = 2.0 * model.hidden / layouts.stream_tp
    heads = 2.0 * _width(model) / layouts.tp + 4.0 * model.heads / layouts.tp
    latent = (model.mla.q_rank or 0) + model.mla.kv_rank if model.mla else 0
    scores = 0.0 if case.flash else SCORES_BYTES * model.heads * case.sequence / layouts.tp
    latents = 2.0 * latent / layouts.stream_tp
    normed = 2.0 * (model.heads + model.kv_heads) * model.head_dim / layouts.tp if model.qk_norm != "none" else 0.0
    less = inputs + normed if case.flash else scores
    return inputs + heads + latents + scores + normed, less * np.ones(len(layouts))


def _width(model: ModelConfig) -> int:
    """Numbers a token of queries, keys, values and attention's output."""
    if model.mla:
        query = model.heads * (model.mla.nope_dim + model.mla.rope_dim)
        return 2 * query + 2 * model.heads * model.mla.v_dim
    return 2 * (model.heads + model.kv_heads) * model.head_dim


def _mlp(case: TrainCase, kind: LayerKind, layouts: Layouts) -> tuple[Array, Array]:
    """(all of it, what selective recomputation leaves out): input, what goes into the activation, what comes out."""
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
    """(bytes an MLP keeps inside, of them what the activation function makes)."""
    apart = 2.0 * ffn if gated and not case.software.fused_layers else 0.0
    return 2.0 * ffn * (1 + gated) + 2.0 * ffn + apart, 2.0 * ffn + apart


def in_flight(layouts: Layouts, micro_batches: Array) -> Array:
    """Micro-batches whose activations the first stage holds: all (GPipe), p (1F1B, zero-bubble), p + (p−1)/v
    (interleaved: Narayanan et al., SC21)."""
    held = np.where(layouts.schedule == INTERLEAVED, layouts.pp + (layouts.pp - 1) / layouts.interleave, layouts.pp)
    held = np.where(layouts.schedule == GPIPE, micro_batches, held)
    flying: Array = np.where(layouts.pp == 1, 1.0, np.minimum(held, micro_batches))
    return flying


def stored_bytes(case: TrainCase, layouts: Layouts, layers: Array, flying: Array) -> Array:
    """Of `layers` layers and `flying` micro-batches: what recomputation leaves between forward and backward pass."""
    total: Array = layers * flying * stored_layer_bytes(case, layouts) + top_bytes(case, layouts)
    return total


def top_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Above the last layer."""
    total: Array = _tokens(case, layouts) * kept(case, layouts).top
    return total


def stored_layer_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Of one layer and micro-batch, averaged over those that are recomputed and those that are not."""
    each = kept(case, layouts)
    share = 1.0 / layouts.recompute_every
    per_layer = np.select(
        [layouts.recompute == FULL, layouts.recompute == SELECTIVE],
        [share * each.entry + (1 - share) * each.whole, share * each.selective + (1 - share) * each.whole],
        each.whole,
    )
    total: Array = _tokens(case, layouts) * per_layer
    return total


def layer_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Of the first layer while it is differentiated: what it makes again, and gradients inside it."""
    each = kept(case, layouts)
    total: Array = _tokens(case, layouts) * (each.again + each.working)
    return total


def last_layer_bytes(case: TrainCase, layouts: Layouts, layers: Array) -> Array:
    """Of the last layers while they are differentiated. Where one in some is recomputed, those after the last that is
    have let go of what they kept by the time it makes anything again."""
    each = kept(case, layouts)
    after = (np.ceil(layers) - 1) % layouts.recompute_every
    total: Array = _tokens(case, layouts) * (np.maximum(each.again - after * each.whole, 0.0) + each.working)
    return total


def _tokens(case: TrainCase, layouts: Layouts) -> Array:
    """Of a micro-batch, on one device."""
    tokens: Array = layouts.micro_batch * case.sequence / layouts.cp
    return tokens
