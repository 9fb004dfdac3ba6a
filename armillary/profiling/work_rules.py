"""The rules by which an operator's arguments give its FLOPs and bytes: one function a family, one table of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from armillary.profiling.call import Call, NoModel, Shape, Tensor
from armillary.spec import attention_ops, layer_ops, ops
from armillary.spec.ops import Kind, Op


def _make(call: Call, kind: Kind, flops: float, read: float, written: float, dtype: str = "") -> Op:
    return Op(name=call.name, kind=kind, flops=flops, bytes_read=read, bytes_written=written,
              dtype=dtype or call.tensors[0].dtype)  # fmt: skip


# --- matrix products and convolutions


def _product(first: int) -> Callable[[Call], Op]:
    """[b,] m, k @ [b,] k, n; the operands are arguments `first` and the next."""

    def rule(call: Call) -> Op:
        a, b = call.tensor(first), call.tensor(first + 1)
        batch = a.shape[0] if len(a.shape) == 3 else 1
        n = b.shape[-1] if len(b.shape) > 1 else 1
        return ops.batched_matmul(call.name, batch, a.shape[-2], n, a.shape[-1], dtype=a.dtype, weight_dtype=b.dtype,
                                  out_dtype="bf16" if a.dtype == "fp8" else "")  # fmt: skip

    return rule


def _linear(call: Call) -> Op:
    x, w = call.tensor(0), call.tensor(1)
    return ops.matmul(call.name, prod(x.shape[:-1]), w.shape[0], x.shape[-1], dtype=x.dtype, weight_dtype=w.dtype)


def _dot(call: Call) -> Op:
    a = call.tensor(0)
    return ops.reduction(call.name, 2 * a.count, dtype=a.dtype)


def _conv(call: Call) -> Op:
    x, w = call.tensor(0), call.tensor(1)
    stride, padding, dilation, groups = (call.numbers(i) for i in (3, 4, 5, 8))
    if not stride or call.flag(6):
        raise NoModel
    shape = ops.Conv(batch=x.shape[0], channels_in=x.shape[1], channels_out=w.shape[0], size=x.shape[2:],
                     kernel=w.shape[2:], stride=stride, padding=padding or (0,), dilation=dilation or (1,),
                     groups=groups[0] if groups else 1)  # fmt: skip
    return ops.conv(call.name, shape, dtype=x.dtype)


def _conv_backward(call: Call) -> Op:
    """Gradients of input and weight: the weight's shape says channels_in / groups, so stride and padding are not
    needed."""
    dy, x, w = (call.tensor(i) for i in range(3))
    first_layer = call.concrete[-1:] and "False" in call.concrete[-1].split(",")[0]
    products = 1 if first_layer else 2
    flops = products * 2 * dy.count * prod(w.shape[1:])
    return _make(call, "conv", flops, products * dy.bytes + x.bytes + w.bytes, w.bytes + (products - 1) * x.bytes)


# --- attention


def _attention(q: int, causal: int, *, backward: bool = False, heads_first: bool = True) -> Callable[[Call], Op]:
    """Queries are argument `q`, keys and values the next two; `causal` is the flag's place. Packed batches (three
    dims) are taken to hold sequences of equal length: their lengths are not in a trace."""

    def rule(call: Call) -> Op:
        query, key, value = (call.tensor(q + i) for i in range(3))
        if len(query.shape) == 3:
            return _varlen(call, query, key, value, q, call.flag(causal), backward)
        b, h, t, d = query.shape if heads_first else _heads_first(query.shape)
        _, kv_h, s, _ = key.shape if heads_first else _heads_first(key.shape)
        shape = attention_ops.AttentionShape(heads=h, kv_heads=kv_h, qk_dim=d, v_dim=value.shape[-1],
                                             causal=call.flag(causal) and t <= s)  # fmt: skip
        make = attention_ops.attention_backward if backward else attention_ops.attention
        return make(call.name, shape, [(t, s)] * b, dtype=query.dtype)

    return rule


def _heads_first(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1], shape[3])


def _varlen(call: Call, query: Tensor, key: Tensor, value: Tensor, q: int, causal: bool, backward: bool) -> Op:
    offsets = next((t for t in call.args[q + 3 :] if isinstance(t, Tensor) and len(t.shape) == 1), Tensor((2,)))
    sequences = max(1, offsets.count - 1)
    shape = attention_ops.AttentionShape(heads=query.shape[1], kv_heads=key.shape[1], qk_dim=query.shape[2],
                                         v_dim=value.shape[2], causal=causal)  # fmt: skip
    spans = [(-(-query.shape[0] // sequences), -(-key.shape[0] // sequences))] * sequences
    make = attention_ops.attention_backward if backward else attention_ops.attention
    return make(call.name, shape, spans, dtype=query.dtype)


# --- rows: norms, softmax, loss, embedding


def _rows(shape: Shape) -> tuple[int, int]:
    return prod(shape[:-1]), shape[-1]


def _norm(kind: Any, *, backward: bool = False) -> Callable[[Call], Op]:
    def rule(call: Call) -> Op:
        x = call.tensor(1 if backward else 0)
        make = layer_ops.norm_backward if backward else layer_ops.norm
        return make(call.name, *_rows(x.shape), dtype=x.dtype, kind=kind)

    return rule


def _batch_norm(call: Call) -> Op:
    x = call.tensor(0)
    return _make(call, "norm", 7 * x.count, x.bytes, x.bytes)


def _batch_norm_backward(call: Call) -> Op:
    x = call.tensor(0)
    return _make(call, "norm", 13 * x.count, 2 * x.bytes, x.bytes)


def _softmax(*, backward: bool = False) -> Callable[[Call], Op]:
    def rule(call: Call) -> Op:
        x = call.tensor(0)
        return ops.softmax(call.name, *_rows(x.shape), dtype=x.dtype, backward=backward)

    return rule


def _nll(call: Call) -> Op:
    """One logit a row is read."""
    rows = call.tensor(1).count
    return _make(call, "loss", rows, rows * (call.tensor(0).size + ops.INDEX_BYTES), 8)


def _nll_backward(call: Call) -> Op:
    x = call.tensor(1)
    return _make(call, "loss", 0, call.tensor(2).bytes, x.bytes)


def _embedding(call: Call) -> Op:
    w, index = call.tensor(0), call.tensor(1)
    return layer_ops.embedding(call.name, index.count, w.shape[-1], dtype=w.dtype)


def _embedding_backward(call: Call) -> Op:
    dy, index = call.tensor(0), call.tensor(1)
    vocab = (call.numbers(2) or (index.count,))[0]
    op = layer_ops.embedding_backward(call.name, index.count, dy.shape[-1], vocab, dtype=dy.dtype)
    return _make(call, "embedding", op.flops, op.bytes_read, vocab * dy.shape[-1] * dy.size)  # zeros are written too


# --- the rest: one pass over memory


def broadcast(call: Call) -> Op:
    tensors = call.tensors
    largest = max(tensors, key=lambda t: t.count)
    rank = max(len(t.shape) for t in tensors)
    padded = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    count = prod(max(sizes) for sizes in zip(*padded, strict=True)) if _fits(padded) else largest.count
    written = count * (tensors[0].size if call.name.endswith("_") else largest.size)
    return _make(call, "elementwise", count, sum(t.bytes for t in tensors), written)


def _fits(shapes: Sequence[Shape]) -> bool:
    return all(len({n for n in sizes if n != 1}) <= 1 for sizes in zip(*shapes, strict=True))


def _reduce(call: Call) -> Op:
    x = call.tensor(0)
    return ops.reduction(call.name, x.count, dtype=x.dtype) if x.size == ops.size_of(x.dtype) else _make(
        call, "reduction", x.count, x.bytes, x.size
    )


def _write(call: Call) -> Op:
    x = call.tensor(0)
    return _make(call, "copy", 0, 0, x.bytes)


def _copy(call: Call) -> Op:
    """copy_(to, from): an expanded source is read once."""
    to, source = call.tensor(0), call.tensor(1)
    return _make(call, "copy", 0, source.bytes, to.bytes)


def _clone(call: Call) -> Op:
    x = call.tensor(0)
    return _make(call, "copy", 0, x.bytes, x.bytes)


def _gather(call: Call) -> Op:
    """Rows or elements picked by an index: what is picked is read and written."""
    x, index = call.tensor(0), call.tensors[-1]
    each = x.count // x.shape[0] if len(index.shape) <= 1 and call.name.endswith(("index_select", "index")) else 1
    picked = index.count * each * x.size
    return _make(call, "copy", 0, picked + index.bytes, picked)


def _concatenate(call: Call) -> Op:
    total = sum(t.bytes for t in call.tensors)
    return _make(call, "copy", 0, total, total)


def foreach(call: Call) -> Op:
    """Every list read, the first written (in place or as the result); a norm or a maximum writes next to nothing."""
    lists = call.lists() or [call.tensors]
    read = sum(t.bytes for tensors in lists for t in tensors)
    first = sum(t.bytes for t in lists[0])
    written = 0.0 if "norm" in call.name or "max" in call.name else first
    read -= first if call.name.rstrip("_").endswith(("zero", "copy")) else 0
    return _make(call, "optimizer", sum(t.count for t in lists[0]) * len(lists), read, written)


def fused_optimizer(call: Call) -> Op:
    """Parameters, gradients and states: all read, all but the gradients written."""
    lists = [tensors for tensors in call.lists() if tensors[0].shape]
    size = [sum(t.bytes for t in tensors) for tensors in lists]
    weights = sum(t.count for t in lists[0])
    flops = (4 if "sgd" in call.name else 15) * weights
    return _make(call, "optimizer", flops, sum(size), sum(size) - (size[1] if len(size) > 1 else 0))


def fused(call: Call) -> Op:
    """An Inductor kernel gets its results as arguments too, so its tensors are its traffic; of an embedding's table
    only the picked rows are touched. Templates (triton_tem) are matrix products."""
    tensors = sorted(call.tensors, key=lambda t: t.count)
    if "triton_tem" in call.name and (product := _template(call)) is not None:
        return product
    if "embedding" in call.name and len(tensors) > 1:
        tensors = tensors[:-1]
    return _make(call, "elementwise", 2 * tensors[-1].count, sum(t.bytes for t in tensors), 0)


def _template(call: Call) -> Op | None:
    tensors = call.tensors
    if "attention" in call.name and len(tensors) > 2 and len(tensors[0].shape) == 4:
        flagged = Call(call.name, call.args, ("True",))  # its mask is not in the trace: causal is the usual one
        return _attention(0, 0)(flagged)
    for a, b in pairwise(tensors):
        if len(a.shape) == len(b.shape) and len(a.shape) in (2, 3) and a.shape[-1] == b.shape[-2]:
            return _product(0)(Call(call.name, (a, b), ()))
    return None


RULES: dict[str, Callable[[Call], Op]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_int_mm", "mv"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation", "addmv", "addmm_", "baddbmm_"), _product(1)),
    **dict.fromkeys(("linear", "mkldnn_linear", "mkldnn::_linear_pointwise"), _linear),
    **dict.fromkeys(("dot", "vdot"), _dot),
    **dict.fromkeys(("convolution", "convolution_overrideable"), _conv),
    "convolution_backward": _conv_backward,
    "_scaled_dot_product_flash_attention": _attention(0, 4),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "_scaled_dot_product_efficient_attention": _attention(0, 6),
    "_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "_scaled_dot_product_fused_attention_overrideable": _attention(0, 5),
    "_flash_attention_forward": _attention(0, 8, heads_first=False),
    "_efficient_attention_forward": _attention(0, 10, heads_first=False),
    "_scaled_dot_product_flash_attention_backward": _attention(1, 11, backward=True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7, backward=True),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, 11, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, backward=True),
    "_flash_attention_backward": _attention(1, 11, backward=True, heads_first=False),
    "flash_attn::_flash_attn_forward": _attention(0, 5, heads_first=False),
    "flash_attn::_flash_attn_varlen_forward": _attention(0, 9, heads_first=False),
    "native_layer_norm": _norm("layer"), "native_layer_norm_backward": _norm("layer", backward=True),
    "_fused_rms_norm": _norm("rms"), "_fused_rms_norm_backward": _norm("rms", backward=True),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_group_norm"), _batch_norm),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward", "native_group_norm_backward"),
                    _batch_norm_backward),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax()),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax(backward=True)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "norm", "linalg_vector_norm",
                     "all", "any", "prod", "var", "var_mean", "std", "logsumexp", "count_nonzero"), _reduce),
    **dict.fromkeys(("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"), _write),
    "copy_": _copy, "clone": _clone,
    **dict.fromkeys(("index_select", "index", "gather", "take"), _gather),
    **dict.fromkeys(("cat", "_cat", "stack"), _concatenate),
}  # fmt: skip
