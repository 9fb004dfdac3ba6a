"""The rules by which an operator's arguments give its FLOPs and bytes: memory-bound operators here, GEMMs,
convolutions, attention and indices in files of their own, and one table of names."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from armillary.profiling.trace.op_call import Call, NoModel, Shape
from armillary.profiling.work.armillary_rules import OWN
from armillary.profiling.work.attention_rules import ATTENTION, flex_template
from armillary.profiling.work.conv_rules import conv, conv_backward, pool, pool_backward, resized
from armillary.profiling.work.index_rules import (
    embedding,
    embedding_backward,
    embedding_bag,
    embedding_bag_backward,
    fill,
    gather,
    place,
    put,
    scatter,
    select,
    subscript,
)
from armillary.profiling.work.matmul_rules import dot, gemm, grouped, linear, recurrent, template
from armillary.profiling.work.serving_engine_rules import SERVING
from armillary.spec.arithmetic import non_gemm_ops, ops
from armillary.spec.arithmetic.ops import Op

_INDEXED = re.compile(r"index|gather|scatter|select|slice|split")
"""parts of a fused kernel's name that say a tensor may be touched in part"""


# --- rows: norms, softmax, loss


def _rows(shape: Shape) -> tuple[int, int]:
    return prod(shape[:-1]), shape[-1]


def _norm(kind: Any, *, backward: bool = False) -> Callable[[Call], Op]:
    def rule(call: Call) -> Op:
        x = call.tensor(1 if backward else 0)
        make = non_gemm_ops.norm_backward if backward else non_gemm_ops.norm
        return make(call.name, *_rows(x.shape), dtype=x.dtype, kind=kind)

    return rule


def _batch_norm(call: Call) -> Op:
    x = call.tensor(0)
    return call.op("norm", 7 * x.count, x.bytes, x.full_bytes)


def _batch_norm_backward(call: Call) -> Op:
    x = call.tensor(0)
    return call.op("norm", 13 * x.count, 2 * x.bytes, x.full_bytes)


def _softmax(*, backward: bool = False) -> Callable[[Call], Op]:
    def rule(call: Call) -> Op:
        x = call.tensor(0)
        return ops.softmax(call.name, *_rows(x.shape), dtype=x.dtype, backward=backward)

    return rule


def _nll(call: Call) -> Op:
    """One logit per row is read."""
    rows = call.tensor(1).count
    return call.op("loss", rows, rows * (call.tensor(0).size + ops.INDEX_BYTES), 8)


def _nll_backward(call: Call) -> Op:
    return call.op("loss", 0, call.tensor(2).bytes, call.tensor(1).full_bytes)


# --- one pass over memory


def broadcast(call: Call) -> Op:
    """Tensors read, one as large as they broadcast to written: the least an elementwise operator can do."""
    tensors = call.tensors
    largest = max(tensors, key=lambda t: t.count)
    try:
        count = prod(np.broadcast_shapes(*(t.shape for t in tensors)))
    except ValueError:
        count = largest.count
    written = count * (tensors[0].size if call.name.endswith("_") else largest.size)
    return call.op("elementwise", count, sum(t.bytes for t in tensors), written)


def _cell(call: Call) -> Op:
    """The elementwise part of a recurrent cell, after its GEMMs."""
    return broadcast(call)


def _reduce(call: Call) -> Op:
    x = call.tensor(0)
    return call.op("reduction", x.count, x.bytes, x.size)


def _write(call: Call) -> Op:
    return call.op("copy", 0, 0, call.tensor(0).full_bytes)


def _copy(call: Call) -> Op:
    """copy_(to, from): an expanded source is read once."""
    return call.op("copy", 0, call.tensor(1).bytes, call.tensor(0).full_bytes)


def _clone(call: Call) -> Op:
    x = call.tensor(0)
    return call.op("copy", 0, x.bytes, x.full_bytes)


def _concatenate(call: Call) -> Op:
    total = sum(t.bytes for t in call.tensors)
    return call.op("copy", 0, total, total)


def foreach(call: Call) -> Op:
    """Every list read, the first written (in place or as the result); a norm or a maximum writes next to nothing."""
    lists = call.lists() or [call.tensors]
    read = sum(t.bytes for tensors in lists for t in tensors)
    first = sum(t.bytes for t in lists[0])
    written = 0.0 if "norm" in call.name or "max" in call.name else first
    read -= first if call.name.rstrip("_").endswith(("zero", "copy")) else 0
    return call.op("optimizer", sum(t.count for t in lists[0]) * len(lists), read, written)


def fused_optimizer(call: Call) -> Op:
    """Parameters, gradients and states: all read, all but the gradients written."""
    lists = [tensors for tensors in call.lists() if tensors[0].shape]
    size = [sum(t.bytes for t in tensors) for tensors in lists]
    weights = sum(t.count for t in lists[0])
    flops = (4 if "sgd" in call.name else 15) * weights
    return call.op("optimizer", flops, sum(size), sum(size) - (size[1] if len(size) > 1 else 0))


def fused(call: Call) -> Op:
    """An Inductor kernel gets its results as arguments too, so its tensors are its traffic; of an embedding's table
    only the picked rows are touched, and of an indexed tensor no more than the next in size. Templates (triton_tem)
    are GEMMs and attention."""
    tensors = sorted(call.tensors, key=lambda t: t.count)
    if "triton_tem" in call.name:
        return (flex_template if "attention" in call.name else template)(call)
    if "embedding" in call.name and len(tensors) > 1:
        tensors = tensors[:-1]
    moved = sum(t.bytes for t in tensors)
    if _INDEXED.search(call.name) and len(tensors) > 1 and tensors[-1].count > tensors[-2].count:
        moved -= tensors[-1].bytes - tensors[-2].count * tensors[-1].size
    return call.op("elementwise", 2 * tensors[-1].count, moved, 0)


def unknown(call: Call) -> Op:
    """No model: what it does is not in its arguments, or is done by the operators it calls."""
    raise NoModel


_REDUCTIONS = """
    sum mean max min amax amin argmax argmin norm linalg_vector_norm all any prod var var_mean std logsumexp
    count_nonzero topk
"""
_WRITES = """
    fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ zeros_like ones_like full_like rand_like randn_like
"""
_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
_RESIZED = (
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact2d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
)
RULES: dict[str, Callable[[Call], Op]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_scaled_mm_v2", "_int_mm", "mv"), gemm(0)),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation", "addmv", "addmv_", "addmm_", "baddbmm_"), gemm(1)),
    **dict.fromkeys(
        (
            "linear",
            "mkldnn_linear",
            "mkldnn::_linear_pointwise",
            "mkl::_mkl_linear",
            "vllm::rocm_unquantized_gemm",
            "aiter::gemm_a16w16",
        ),
        linear,
    ),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), grouped),
    **dict.fromkeys(("dot", "vdot"), dot),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), recurrent()),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), recurrent(gemms=2)),
    "mkldnn_rnn_layer": recurrent(weights=slice(1, 3)),
    "mkldnn_rnn_layer_backward": recurrent(weights=slice(1, 3), gemms=2),
    **dict.fromkeys(
        (
            "_thnn_fused_lstm_cell",
            "_thnn_fused_gru_cell",
            "_thnn_fused_lstm_cell_backward_impl",
            "_thnn_fused_gru_cell_backward",
        ),
        _cell,
    ),
    **dict.fromkeys(("convolution", "convolution_overrideable"), conv()),
    "mkldnn::_convolution_pointwise": conv(stride=4, padding=3, dilation=5, groups=6, transposed=-1),
    "convolution_backward": conv_backward,
    **ATTENTION,
    **SERVING,
    **OWN,
    "native_layer_norm": _norm("layer"),
    "native_layer_norm_backward": _norm("layer", backward=True),
    "_fused_rms_norm": _norm("rms"),
    "_fused_rms_norm_backward": _norm("rms", backward=True),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_group_norm"), _batch_norm),
    **dict.fromkeys(
        (
            "native_batch_norm_backward",
            "cudnn_batch_norm_backward",
            "miopen_batch_norm_backward",
            "native_group_norm_backward",
        ),
        _batch_norm_backward,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax()),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax(backward=True)),
    **dict.fromkeys(("dropout", "nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss"), unknown),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), embedding_bag),
    "_embedding_bag_dense_backward": embedding_bag_backward,
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(_WRITES.split(), _write),
    "copy_": _copy,
    "clone": _clone,
    "index_select": select,
    **dict.fromkeys(("gather", "take"), gather),
    **dict.fromkeys(("index", "_unsafe_index"), subscript),
    **dict.fromkeys(("index_copy", "index_copy_"), place()),
    **dict.fromkeys(("index_add", "index_add_", "index_reduce_"), place(adds=True)),
    **dict.fromkeys(("index_fill", "index_fill_"), fill),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), put),
    **dict.fromkeys(("scatter", "scatter_"), scatter()),
    **dict.fromkeys(("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), scatter(adds=True)),
    **dict.fromkeys(("cat", "_cat", "stack"), _concatenate),
    **dict.fromkeys(_POOLS, pool()),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), pool(indices=True)),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), pool_backward(indices=True)
    ),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"), pool_backward()),
    **dict.fromkeys(_RESIZED, resized),
}
