"""What lies between two GEMMs of a layer on a CPU, through the C++ kernels: norms, gated SiLU, and attention of the
newest tokens from the fused projection on. In torch each is up to thirty calls, which for one token take longer than
the GEMMs.

Each function takes what its reference takes and leaves to the faster torch version what the kernels have not.
"""

import ctypes
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.core.requirements import LOG
from armillary.kernels.native.library import library
from armillary.kernels.norm.norm import add_norm as torch_add_norm
from armillary.kernels.norm.norm import row_add_norm, row_norm
from armillary.kernels.paged.paged_attention import PagedBatch, by_sdpa
from armillary.kernels.paged.qkv_to_cache import QkvOptions, unpadded
from armillary.kernels.paged.qkv_to_cache import attend_tokens as torch_attend_tokens
from armillary.kernels.paged.qkv_to_cache import qkv_cache as torch_qkv_cache
from armillary.kernels.pointwise.activation import activate as torch_activate

# T tokens, N query heads, K KV heads, D head dim, R rotated dims / 2

_MOST_GROUP, _MOST_DIM = 32, 256
_CACHES = (torch.float32, torch.bfloat16)
_TOLERANCE = 1e-5


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    """`armillary.kernels.norm.norm.norm`."""
    if not _takes_norm(x, weight, bias, kind):
        return row_norm(x, weight, bias, eps, kind, plus_one)
    y = torch.empty_like(x)
    _run_norm(x, None, weight, None, y, eps, plus_one)
    return y


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str = "rms",
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """`armillary.kernels.norm.norm.add_norm`."""
    if not _takes_norm(x, weight, bias, kind) or not _is_plain(residual) or residual.shape != x.shape:
        return row_add_norm(x, residual, weight, bias, eps, kind, plus_one)
    y, total = torch.empty_like(x), torch.empty_like(x)
    _run_norm(x, residual, weight, total, y, eps, plus_one)
    return y, total


def _takes_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str) -> bool:
    return kind == "rms" and bias is None and _is_plain(x) and (weight is None or _is_plain(weight))


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def _run_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, total: Tensor | None, y: Tensor, eps: float, more: bool
) -> None:
    pointers = (None if each is None else each.data_ptr() for each in (x, residual, weight, total, y))
    columns = x.shape[-1]
    _kernels().armillary_add_norm(
        *pointers, x.numel() // columns if columns else 0, columns, eps, more, torch.get_num_threads()
    )


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """`armillary.kernels.pointwise.activation.activate`."""
    if activation != "silu" or not gated or not _is_plain(x):
        return torch_activate(x, activation, gated)
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2)
    _kernels().armillary_gated_silu(x.data_ptr(), y.data_ptr(), y.numel(), torch.get_num_threads())
    return y


class _Decode(ctypes.Structure):
    """`Decode` of decode_attention.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("sequences", "kv_heads", "group", "dim", "rotated", "page_size", "pages")
        ),
        *((name, ctypes.c_int64) for name in ("page_bytes", "value_bytes", "head_bytes")),
        *((name, ctypes.c_int32) for name in ("half", "interleaved", "plus_one", "window")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "cache", "slots", "tables", "lengths")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "q_weight", "k_weight", "sinks")),
    )


def attend_tokens(
    qkv: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    heads: QkvOptions,
    batch: PagedBatch,
    options: AttentionOptions,
) -> Tensor:
    """`armillary.kernels.paged.qkv_to_cache.attend_tokens`: [T, N·D], after key and value are written to the cache."""
    if not _takes(qkv, cache, cos_TR, heads) or options.chunk or not _are_plain(options.sinks_N):
        q_TND, cache = qkv_cache(qkv, cache, slots_T, cos_TR, sin_TR, heads)
        return by_sdpa(q_TND, cache, batch, options).flatten(1)
    tables_BP, lengths_B = batch.tables_BP.int().contiguous(), batch.lengths_B.int().contiguous()
    operands = {"tables": tables_BP, "lengths": lengths_B, "sinks": options.sinks_N}
    also = {"pages": tables_BP.shape[1], "window": options.window, "scale": options.scale_for(cache.shape[4])}
    return _run(_kernels().armillary_decode, qkv, cache, slots_T, cos_TR, sin_TR, heads, operands, also)


def qkv_cache(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None, heads: QkvOptions
) -> tuple[Tensor, Tensor]:
    """`armillary.kernels.paged.qkv_to_cache.qkv_cache`."""
    if not _takes(qkv, cache, cos_TR, heads):
        return unpadded(qkv, cache, slots_T, cos_TR, sin_TR, heads)
    out = _run(_kernels().armillary_qkv_cache, qkv, cache, slots_T, cos_TR, sin_TR, heads, {}, {})
    return out.unflatten(1, (-1, cache.shape[4])), cache


def _run(
    kernel: Any,
    qkv: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    heads: QkvOptions,
    operands: dict[str, Tensor | None],
    also: dict[str, Any],
) -> Tensor:
    kv_heads, page_size, dim = cache.shape[2:]
    size, group = cache.element_size(), qkv.shape[1] // (kv_heads * dim) - 2
    out = torch.empty(qkv.shape[0], kv_heads * group * dim)
    operands |= {"qkv": qkv, "out": out, "cache": cache, "slots": slots_T, "cosines": cos_TR, "sines": sin_TR}
    operands |= {"q_weight": heads.q_weight, "k_weight": heads.k_weight}
    what = _Decode(
        sequences=qkv.shape[0],
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        rotated=0 if cos_TR is None else cos_TR.shape[-1],
        page_size=page_size,
        page_bytes=cache.stride(0) * size,
        value_bytes=cache.stride(1) * size,
        head_bytes=cache.stride(2) * size,
        half=cache.dtype == torch.bfloat16,
        interleaved=heads.interleaved,
        plus_one=heads.plus_one,
        eps=heads.eps,
        **{name: tensor.data_ptr() for name, tensor in operands.items() if tensor is not None},
        **also,
    )
    kernel(ctypes.byref(what), torch.get_num_threads())
    return out


def _takes(qkv: Tensor, cache: Tensor, cos_TR: Tensor | None, heads: QkvOptions) -> bool:
    """fp32 projections, a cache in fp32 or bf16 with contiguous pages, RMS norms of each head alone."""
    kv_heads, _, dim = cache.shape[2:]
    group, norms = qkv.shape[1] // (kv_heads * dim) - 2, (heads.q_weight, heads.k_weight)
    normed = heads.norm == "none" or all(each is not None and each.numel() == dim for each in norms)
    simple = heads.clip is None and heads.scales_2K is None and heads.q_scale_T is None and heads.norm != "layer"
    fits = 0 < group <= _MOST_GROUP and dim <= _MOST_DIM and not dim % 16 and cache.stride()[3:] == (dim, 1)
    return bool(simple and normed and fits and cache.dtype in _CACHES and _are_plain(qkv, cos_TR, *norms))


def _are_plain(*tensors: Tensor | None) -> bool:
    return all(each is None or _is_plain(each) for each in tensors)


def _kernels() -> Any:
    kernels = library()
    assert kernels is not None, "`agree` comes first"
    return kernels


@once
def agree() -> bool:
    """Whether there are kernels here and each gives what its reference gives, on random numbers."""
    if library() is None:
        return False
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = normal(3, 75), normal(3, 75), normal(75), None, 1e-6
    tokens = _random_tokens(normal)
    compared = {
        "add_norm": (add_norm(*rows)[0], torch_add_norm(*rows)[0]),
        "activate": (
            activate(rows[0][:, :74].contiguous(), "silu", True),
            torch_activate(rows[0][:, :74], "silu", True),
        ),
        "qkv_cache": (qkv_cache(*tokens[:6])[0], torch_qkv_cache(*tokens[:6])[0]),
        "attend_tokens": (attend_tokens(*tokens), torch_attend_tokens(*tokens)),
    }
    wrong = [name for name, (ours, theirs) in compared.items() if relative_error(ours, theirs) > _TOLERANCE]
    if wrong:
        LOG.warning("C++ kernels that are wrong on this CPU, torch runs instead: %s", ", ".join(wrong))
    return not wrong


def _random_tokens(normal: Any) -> tuple[Any, ...]:
    """Two sequences of 3 and 20 keys in pages of 8."""
    lengths_B, tables_BP = torch.tensor([3, 20]), torch.tensor([[4, 0, 0], [2, 3, 1]])
    batch = PagedBatch(tables_BP=tables_BP.int(), starts=torch.arange(3).int(), lengths_B=lengths_B.int(), max_query=1)
    cache, angles_TR = normal(5, 2, 2, 8, 32), normal(2, 16)
    slots_T = torch.tensor([4 * 8 + 2, 1 * 8 + 3])
    return (
        normal(2, 2 * 4 * 32),
        cache,
        slots_T,
        angles_TR.cos(),
        angles_TR.sin(),
        QkvOptions(),
        batch,
        AttentionOptions(),
    )
