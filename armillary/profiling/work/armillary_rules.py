"""Rules for our own kernels (armillary::…), whose arguments are those of armillary.kernels.

Attention over packed documents or cache pages has none: which keys the mask leaves is not in a trace.
"""

from collections.abc import Callable
from math import prod

from armillary.profiling.trace.op_call import Call, NoModel
from armillary.spec.arithmetic import attention_ops, ops
from armillary.spec.arithmetic.ops import Op, OpKind


def _attention(q: int, *, backward: bool = False) -> Callable[[Call], Op]:
    """(…, q, k, v, documents, blocks, sinks, slopes, scale, window, softcap, causal), all of [B, T, N, D]."""
    return _over_keys(q, window=q + 8, causal=q + 10, documents=q + 3, backward=backward)


def _over_keys(
    q: int, *, window: int, causal: int | None, documents: int | None, backward: bool = False
) -> Callable[[Call], Op]:
    """Attention with these arguments, from `q` on: q, k, v."""

    def rule(call: Call) -> Op:
        query, key, value = (call.tensor(q + i) for i in range(3))
        if documents is not None and call.has_tensor(documents) and call.tensor(documents).shape:
            raise NoModel
        b, t, heads, d = query.shape
        _, s, kv_heads, _ = key.shape
        keys = call.numbers(window)
        shape = attention_ops.AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            qk_dim=d,
            v_dim=value.shape[-1],
            causal=causal is None or call.flag(causal),
            window=keys[0] if keys and keys[0] > 0 else None,
        )
        make = attention_ops.attention_backward if backward else attention_ops.attention
        return make(call.name, shape, [(t, s)] * b, dtype=query.dtype)

    return rule


def _simplicial(q: int, *, backward: bool = False) -> Callable[[Call], Op]:
    """(…, q [B, T, N, D], k and v [B, T, 2·KV heads, D], documents, scale, window_1, window_2)."""

    def rule(call: Call) -> Op:
        query, key = call.tensor(q), call.tensor(q + 1)
        windows = [*call.numbers(q + 5), *call.numbers(q + 6)]
        if len(windows) != 2 or (call.has_tensor(q + 3) and call.tensor(q + 3).shape):
            raise NoModel
        b, t, heads, d = query.shape
        shape = attention_ops.AttentionShape(heads=heads, kv_heads=key.shape[2] // 2, qk_dim=d, v_dim=d)
        window_1, window_2 = map(int, windows)
        return attention_ops.simplicial_attention(
            call.name, shape, [(t, t)] * b, window_1=window_1, window_2=window_2, dtype=query.dtype, backward=backward
        )

    return rule


def one_pass(kind: OpKind, *written: int, flops_each: float = 5) -> Callable[[Call], Op]:
    """Every tensor read once, and as much written as the arguments `written` hold, where they are given."""

    def rule(call: Call) -> Op:
        results = sum(call.tensor(i).full_bytes for i in written if call.has_tensor(i))
        largest = max(t.count for t in call.tensors)
        return call.op(kind, flops_each * largest, sum(t.bytes for t in call.tensors), results)

    return rule


def _activate(call: Call) -> Op:
    """With a gate the output is half the input."""
    x = call.tensor(0)
    out = x.count // 2 if call.flag(2) else x.count
    return call.op("elementwise", 5 * out, x.bytes, out * x.size)


def _linear_loss(call: Call) -> Op:
    """Reading and writing the logits; the GEMMs are operators of their own."""
    x, weight = call.tensor(0), call.tensor(1)
    logits = prod(x.shape[:-1]) * weight.shape[0]
    return call.op("loss", 5 * logits, logits * x.size, logits * x.size if call.flag(6) or call.flag(7) else 0)


def _small_linear(call: Call) -> Op:
    """(x, weight [n, k], norm, residual, eps, gated, bias)."""
    x, w = call.tensor(0), call.tensor(1)
    tokens, n = prod(x.shape[:-1]), w.shape[0]
    added = sum(call.tensor(i).bytes for i in (3, 6) if call.has_tensor(i))
    written = tokens * (n // 2 if call.flag(5) else n) * x.size
    return call.op("matmul", 2 * tokens * n * w.shape[1], x.bytes + w.bytes + added, written)


def _large_linear(call: Call) -> Op:
    """(x, weight [n, k], bias, activation, residual, tiles)."""
    x, w = call.tensor(0), call.tensor(1)
    tokens, n = prod(x.shape[:-1]), w.shape[0]
    added = sum(call.tensor(i).bytes for i in (2, 4) if call.has_tensor(i))
    return call.op("matmul", 2 * tokens * n * w.shape[1], x.bytes + w.bytes + added, tokens * n * x.size)


def _grouped(call: Call) -> Op:
    """(x [rows, k], weight [experts, n, k], ends)."""
    x, w = call.tensor(0), call.tensor(1)
    return ops.grouped_matmul(call.name, x.shape[0], w.shape[1], w.shape[2], groups=w.shape[0], dtype=x.dtype)


def _grouped_backward(call: Call) -> Op:
    """(dy, x, weight, ends, whether dx is wanted, whether dweight is)."""
    dy, x, w = (call.tensor(i) for i in range(3))
    wanted = [call.flag(4), call.flag(5)]
    read = sum(wanted) * dy.bytes + (w.bytes if wanted[0] else 0) + (x.bytes if wanted[1] else 0)
    written = (x.full_bytes if wanted[0] else 0) + (w.full_bytes if wanted[1] else 0)
    return call.op("matmul", sum(wanted) * 2 * x.shape[0] * w.shape[1] * w.shape[2], read, written, x.dtype)


def _quantise(call: Call) -> Op:
    """What fp8 GEMMs need beforehand: each operand is read, and one byte per element written."""
    operands = call.tensors
    count = sum(t.count for t in operands)
    return call.op("elementwise", 2 * count, sum(t.bytes for t in operands), count * ops.size_of("fp8"))


def _fp8_matmul(call: Call) -> Op:
    """(x, weight [n, k] in fp8, scale, norm, gated, eps, library): the library's GEMM is an operator of its own."""
    x, w = call.tensor(0), call.tensor(1)
    tokens, (n, k) = prod(x.shape[:-1]), w.shape
    if call.flag(6):
        return call.op("elementwise", 2 * x.count, x.bytes, tokens * k * w.size)
    return call.op("matmul", 2 * tokens * n * k, x.bytes + w.bytes, tokens * n * x.size, dtype="fp8")


def _weight_only(call: Call) -> Op:
    """(x, codes [n, …], scales, zeros, kind, group)."""
    x, n = call.tensor(0), call.tensor(1).shape[0]
    tokens = prod(x.shape[:-1])
    return call.op("matmul", 2 * x.count * n, sum(each.bytes for each in call.tensors), tokens * n * x.size)


def _block_fp8(call: Call) -> Op:
    """(x, weight [n, k] in fp8, scales, library): the library's GEMM is an operator of its own."""
    x, w = call.tensor(0), call.tensor(1)
    if call.flag(3):
        return call.op("elementwise", 2 * x.count, x.bytes, x.count * w.size)
    written = prod(x.shape[:-1]) * w.shape[0] * x.size
    return call.op("matmul", 2 * x.count * w.shape[0], x.bytes + w.bytes, written, dtype="fp8")


def _qkv_cache(call: Call) -> Op:
    """Queries come out, keys and values go into the cache, of which only their rows are touched."""
    qkv, slots = call.tensor(0), call.tensor(2)
    return call.op("copy", 6 * qkv.count, qkv.bytes + slots.bytes, qkv.full_bytes)


def _latent_to_cache(call: Call) -> Op:
    """Latents and rotary keys are normed and rotated into the cache, rotary queries come out."""
    kv, q, slots = call.tensor(0), call.tensor(1), call.tensor(3)
    return call.op("copy", 6 * (kv.count + q.count), kv.bytes + q.bytes + slots.bytes, kv.full_bytes + q.full_bytes)


OWN: dict[str, Callable[[Call], Op]] = {
    "armillary::latent_to_cache": _latent_to_cache,
    "armillary::attention": _attention(0),
    "armillary::attention_backward": _attention(3, backward=True),
    "armillary::window_attention": _over_keys(0, window=5, causal=None, documents=None),
    "armillary::window_attention_backward": _over_keys(3, window=8, causal=None, documents=None, backward=True),
    "armillary::simplicial": _simplicial(0),
    "armillary::simplicial_backward": _simplicial(3, backward=True),
    "armillary::norm": one_pass("norm", 0, 1),
    "armillary::norm_backward": one_pass("norm", 2, flops_each=10),
    "armillary::rope": one_pass("elementwise", 0),
    "armillary::rope_backward": one_pass("elementwise", 0, 1, 2),
    "armillary::activate": _activate,
    "armillary::activate_backward": one_pass("elementwise", 1),
    "armillary::activate_backward_again": one_pass("elementwise", 0, 1),
    "armillary::linear_cross_entropy": _linear_loss,
    "armillary::small_linear": _small_linear,
    "armillary::large_linear": _large_linear,
    "armillary::grouped_linear": _grouped,
    "armillary::grouped_linear_backward": _grouped_backward,
    **dict.fromkeys(("armillary::fp8_linear", "armillary::fp8_linear_backward"), _quantise),
    "armillary::fp8_matmul": _fp8_matmul,
    "armillary::weight_only_linear": _weight_only,
    "armillary::block_fp8_linear": _block_fp8,
    "armillary::qkv_cache": _qkv_cache,
    **dict.fromkeys(("armillary::logprobs", "armillary::sample"), one_pass("sampling")),
}
