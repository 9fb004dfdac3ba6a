"""The parts of a layer as operations: the forms of attention, MLPs, experts, norms.

Residual adds are fused into the norms, biases and caps into the GEMM before them.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from armillary.spec.arithmetic import non_gemm_ops, ops
from armillary.spec.arithmetic.attention_ops import (
    AttentionShape,
    Span,
    attention,
    attention_backward,
    simplicial_attention,
)
from armillary.spec.arithmetic.delta_ops import causal_conv, delta_decode, delta_rule
from armillary.spec.arithmetic.ops import Op
from armillary.spec.model import MLA, LayerKind, ModelConfig, MoE


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one pass, the rows of its output projection, and dtypes: of activations, of stored weights and of
    the KV cache where they differ. `flash`: attention without the score matrix in memory. `same_tokens`: all are the
    same token, and go to the same experts."""

    spans: tuple[Span, ...]
    """(new tokens, keys they attend to) of each sequence"""
    logits: int
    dtype: str = "bf16"
    weight_dtype: str = ""
    kv_dtype: str = ""
    flash: bool = True
    same_tokens: bool = False

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.spans)

    @property
    def decoding(self) -> bool:
        """Every sequence adds one token to a cache."""
        return all(queries == 1 < keys for queries, keys in self.spans)


@dataclass(frozen=True, kw_only=True)
class OpWithBackward:
    """One operation of the network, forward and backward."""

    forward: Op
    backward: tuple[Op, ...] = ()


def norm(config: ModelConfig, name: str, batch: Batch, *, residual: bool) -> OpWithBackward:
    """A norm over the residual stream."""
    return norm_of(config, name, batch.tokens, config.hidden, batch, residual=residual)


def norm_of(
    config: ModelConfig, name: str, rows: int, columns: int, batch: Batch, *, residual: bool = False
) -> OpWithBackward:
    """A norm over rows of any width."""
    forward = non_gemm_ops.norm(name, rows, columns, dtype=batch.dtype, kind=config.norm, residual=residual)
    back = non_gemm_ops.norm_backward(
        f"{name}.d", rows, columns, dtype=batch.dtype, kind=config.norm, residual=residual
    )
    return OpWithBackward(forward=forward, backward=(back,))


def add(name: str, config: ModelConfig, batch: Batch) -> OpWithBackward:
    """Its backward passes the same gradient to both sides, without an operation."""
    return OpWithBackward(forward=ops.elementwise(name, batch.tokens * config.hidden, dtype=batch.dtype, inputs=2))


def linear(name: str, batch: Batch, out: int, into: int) -> OpWithBackward:
    """A projection of every token; its backward computes dX, then dW."""
    forward = ops.matmul(name, batch.tokens, out, into, dtype=batch.dtype, weight_dtype=batch.weight_dtype)
    return OpWithBackward(forward=forward, backward=ops.matmul_backward(forward))


# --- attention


def attention_operations(config: ModelConfig, kind: LayerKind, batch: Batch) -> list[OpWithBackward]:
    """Projections, norms and rotation of queries and keys, the attention itself, output projection."""
    if config.mla and kind.attention != "2-simplicial":
        return _latent_attention(config, config.mla, kind, batch)
    if kind.attention == "gated_delta":
        return _gated_delta(config, batch)
    keys = 2 if kind.attention == "2-simplicial" else 1
    width = (config.heads * (1 + config.attention_gate) + 2 * keys * config.kv_heads) * config.head_dim
    rotated = config.heads + keys * config.kv_heads
    has_norm = config.qk_norm != "none"
    return [
        linear("qkv", batch, width, config.hidden),
        *([norm_of(config, "qk_norm", batch.tokens * rotated, config.head_dim, batch)] if has_norm else []),
        *_rope(config, kind, batch, rotated),
        _core(config, kind, batch),
        *([_gate("attention_gate", batch, config.heads * config.head_dim)] if config.attention_gate else []),
        linear("out", batch, config.hidden, config.heads * config.head_dim),
    ]


def _gate(name: str, batch: Batch, columns: int) -> OpWithBackward:
    """x · f(gate), backward to both."""
    elements = batch.tokens * columns
    forward = ops.elementwise(name, elements, dtype=batch.dtype, inputs=2, flops_each=2)
    backward = ops.elementwise(f"{name}.d", elements, dtype=batch.dtype, inputs=3, outputs=2, flops_each=5)
    return OpWithBackward(forward=forward, backward=(backward,))


def _gated_delta(config: ModelConfig, batch: Batch) -> list[OpWithBackward]:
    """Projection, convolution, the delta rule, norm and gate of its outputs, output projection."""
    delta = config.gated_delta
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    sizes: dict[str, Any] = {
        "tokens": batch.tokens,
        "channels": delta.channels,
        "width": delta.conv,
        "dtype": batch.dtype,
    }
    conv = OpWithBackward(
        forward=causal_conv("conv", **sizes), backward=(causal_conv("conv.d", **sizes, backward=True),)
    )
    return [
        linear("qkv", batch, delta.channels + values + 2 * delta.value_heads, config.hidden),
        conv,
        _delta_core(config, batch),
        norm_of(config, "delta_norm", batch.tokens * delta.value_heads, delta.value_dim, batch),
        _gate("delta_gate", batch, values),
        linear("out", batch, config.hidden, values),
    ]


def _delta_core(config: ModelConfig, batch: Batch) -> OpWithBackward:
    delta = config.gated_delta
    assert delta is not None
    copies = batch.tokens // max(1, sum(queries for queries, _ in batch.spans))  # of equal sequences
    sizes: dict[str, Any] = {"sequences": copies * len(batch.spans), "dtype": batch.dtype}
    if batch.decoding:
        return OpWithBackward(forward=delta_decode("gated_delta", delta, **sizes))
    forward = delta_rule("gated_delta", delta, tokens=batch.tokens, **sizes)
    backward = delta_rule("gated_delta.d", delta, tokens=batch.tokens, **sizes, backward=True)
    return OpWithBackward(forward=forward, backward=(backward,))


def _rope(config: ModelConfig, kind: LayerKind, batch: Batch, heads: int) -> list[OpWithBackward]:
    if config.positions != "rope" or not kind.rope:
        return []
    forward = non_gemm_ops.rope("rope", batch.tokens, heads, config.rotary_dim, dtype=batch.dtype)
    return [OpWithBackward(forward=forward, backward=(replace(forward, name="rope.d"),))]


def attention_shape(config: ModelConfig, kind: LayerKind) -> AttentionShape:
    """Heads, dims and mask of a layer; MLA in its expanded form, as in training and prefill."""
    window = config.window if kind.attention == "sliding" else None
    chunk = config.window if kind.attention == "chunked" else None
    if config.mla and kind.attention != "2-simplicial":
        qk, v, kv_heads = config.mla.nope_dim + config.mla.rope_dim, config.mla.v_dim, config.heads
    else:
        qk = v = config.head_dim
        kv_heads = config.kv_heads
    return AttentionShape(heads=config.heads, kv_heads=kv_heads, qk_dim=qk, v_dim=v, window=window, chunk=chunk)


def _core(config: ModelConfig, kind: LayerKind, batch: Batch) -> OpWithBackward:
    shape = attention_shape(config, kind)
    if kind.attention == "2-simplicial":
        assert config.simplicial is not None
        w1, w2 = config.simplicial.window_1, config.simplicial.window_2
        fwd, bwd = (
            simplicial_attention(name, shape, batch.spans, window_1=w1, window_2=w2, dtype=batch.dtype, backward=back)
            for name, back in (("attention", False), ("attention.d", True))
        )
        return OpWithBackward(forward=fwd, backward=(bwd,))
    forward = attention("attention", shape, batch.spans, dtype=batch.dtype, kv_dtype=batch.kv_dtype, flash=batch.flash)
    backward = attention_backward("attention.d", shape, batch.spans, dtype=batch.dtype, flash=batch.flash)
    return OpWithBackward(forward=forward, backward=(backward,))


def _latent_attention(config: ModelConfig, mla: MLA, kind: LayerKind, batch: Batch) -> list[OpWithBackward]:
    """MLA (DeepSeek-V2, arXiv 2405.04434): expanded keys and values for training and prefill; a decode step instead
    absorbs the up-projections into query and output and attends to the cached latent itself."""
    query = config.heads * (mla.nope_dim + mla.rope_dim)
    q_down = []
    if mla.q_rank:
        q_down = [
            linear("q_down", batch, mla.q_rank, config.hidden),
            norm_of(config, "q_norm", batch.tokens, mla.q_rank, batch),
        ]
    return [
        *q_down,
        linear("q", batch, query, mla.q_rank or config.hidden),
        linear("kv_down", batch, mla.kv_rank + mla.rope_dim, config.hidden),
        norm_of(config, "kv_norm", batch.tokens, mla.kv_rank, batch),
        *_rope(config, kind, batch, config.heads + 1),
        *(_absorbed if batch.decoding else _expanded)(config, mla, kind, batch),
        linear("out", batch, config.hidden, config.heads * mla.v_dim),
    ]


def _expanded(config: ModelConfig, mla: MLA, kind: LayerKind, batch: Batch) -> list[OpWithBackward]:
    keys = replace(batch, spans=tuple((k, k) for _, k in batch.spans))
    up = linear("kv_up", keys, config.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
    return [up, _core(config, kind, batch)]


def _absorbed(config: ModelConfig, mla: MLA, kind: LayerKind, batch: Batch) -> list[OpWithBackward]:
    shape = replace(
        attention_shape(config, kind), kv_heads=1, qk_dim=mla.kv_rank + mla.rope_dim, v_dim=mla.kv_rank, latent=True
    )
    core = attention("attention", shape, batch.spans, dtype=batch.dtype, kv_dtype=batch.kv_dtype)
    into = ops.batched_matmul("q_absorb", config.heads, batch.tokens, mla.kv_rank, mla.nope_dim, dtype=batch.dtype)
    out = ops.batched_matmul("v_absorb", config.heads, batch.tokens, mla.v_dim, mla.kv_rank, dtype=batch.dtype)
    return [OpWithBackward(forward=into), OpWithBackward(forward=core), OpWithBackward(forward=out)]


# --- MLP and experts


def mlp_operations(config: ModelConfig, batch: Batch, ffn: int, name: str, *, gated: bool) -> list[OpWithBackward]:
    """Up (and gate), activation, down."""
    up = linear(f"{name}.gate_up" if gated else f"{name}.up", batch, (1 + gated) * ffn, config.hidden)
    act = _activation(config, name, batch.tokens, ffn, batch.dtype, gated=gated)
    return [up, act, linear(f"{name}.down", batch, config.hidden, ffn)]


def _activation(config: ModelConfig, name: str, rows: int, ffn: int, dtype: str, *, gated: bool) -> OpWithBackward:
    act = config.activation
    forward = non_gemm_ops.activation(f"{name}.act", rows, ffn, dtype=dtype, function=act, gated=gated)
    backward = non_gemm_ops.activation_backward(f"{name}.act.d", rows, ffn, dtype=dtype, function=act, gated=gated)
    return OpWithBackward(forward=forward, backward=(backward,))


def moe_operations(config: ModelConfig, moe: MoE, batch: Batch) -> list[OpWithBackward]:
    """Router, dispatch, the experts' gated MLPs, combine; then the shared expert."""
    tokens, hidden, top_k = batch.tokens, config.hidden, moe.top_k
    send = non_gemm_ops.dispatch("moe.dispatch", tokens, hidden, top_k, dtype=batch.dtype)
    gather = non_gemm_ops.combine("moe.combine", tokens, hidden, top_k, dtype=batch.dtype)
    return [
        linear("moe.router", batch, moe.num_experts, hidden),
        _routing(moe, tokens),
        OpWithBackward(forward=send, backward=(replace(gather, name="moe.dispatch.d"),)),
        _grouped("moe.gate_up", moe, batch, 2 * moe.ffn, hidden),
        _activation(config, "moe", tokens * top_k, moe.ffn, batch.dtype, gated=True),
        _grouped("moe.down", moe, batch, hidden, moe.ffn),
        OpWithBackward(forward=gather, backward=(replace(send, name="moe.combine.d"),)),
        *_shared(config, moe, batch),
    ]


def _routing(moe: MoE, tokens: int) -> OpWithBackward:
    forward = non_gemm_ops.router("moe.route", tokens, moe.num_experts, moe.top_k, dtype="fp32")
    backward = ops.softmax("moe.route.d", tokens, moe.num_experts, dtype="fp32", backward=True)
    return OpWithBackward(forward=forward, backward=(backward,))


def _grouped(name: str, moe: MoE, batch: Batch, out: int, into: int) -> OpWithBackward:
    rows, used = batch.tokens * moe.top_k, experts_used(moe, 1 if batch.same_tokens else batch.tokens)
    forward = ops.grouped_matmul(name, rows, out, into, groups=used, dtype=batch.dtype, weight_dtype=batch.weight_dtype)
    backward = ops.grouped_matmul_backward(name, rows, out, into, groups=moe.num_experts, dtype=batch.dtype)
    return OpWithBackward(forward=forward, backward=backward)


def experts_used(moe: MoE, tokens: int) -> int:
    """Experts with at least one of `tokens` if all are equally likely: E·(1 − (1 − k/E)^tokens), rounded up. In a
    small decode batch most experts' weights are never read."""
    expected = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    return min(moe.num_experts, ceil(expected - 1e-9))


def _shared(config: ModelConfig, moe: MoE, batch: Batch) -> list[OpWithBackward]:
    if not moe.shared_ffn:
        return []
    gate = [linear("shared.gate", batch, 1, config.hidden)] if moe.shared_gate else []
    return [
        *gate,
        *mlp_operations(config, batch, moe.shared_ffn, "shared", gated=True),
        add("shared.add", config, batch),
    ]
