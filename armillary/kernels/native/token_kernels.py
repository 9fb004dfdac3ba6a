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
    if not _takes_tokens(qkv, cache, cos_TR, heads, options):
        q_TND, cache = unpadded(qkv, cache, slots_T, cos_TR, sin_TR, heads)
        return by_sdpa(q_TND, cache, batch, options).flatten(1)
    kv_heads, page_size, dim = cache.shape[2:]
    tokens, group, size = len(qkv), qkv.shape[1] // (kv_heads * dim) - 2, cache.element_size()
    out = torch.empty(tokens, kv_heads * group * dim)
    held = {
        "qkv": qkv,
        "out": out,
        "cache": cache,
        "slots": slots_T.contiguous(),
        "tables": batch.tables_BP.int().contiguous(),
        "lengths": batch.lengths_B.int().contiguous(),
        "cosines": None if cos_TR is None else cos_TR.contiguous(),
        "sines": None if sin_TR is None else sin_TR.contiguous(),
        "q_weight": heads.q_weight,
        "k_weight": heads.k_weight,
        "sinks": options.sinks_N,
    }
    what = _Decode(
        sequences=tokens,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        rotated=0 if cos_TR is None else cos_TR.shape[-1],
        page_size=page_size,
        pages=batch.tables_BP.shape[1],
        page_bytes=cache.stride(0) * size,
        value_bytes=cache.stride(1) * size,
        head_bytes=cache.stride(2) * size,
        half=cache.dtype == torch.bfloat16,
        interleaved=heads.interleaved,
        plus_one=heads.plus_one,
        window=options.window,
        eps=heads.eps,
        scale=options.scale_for(dim),
        **{name: tensor.data_ptr() for name, tensor in held.items() if tensor is not None},
    )
    _kernels().armillary_decode(ctypes.byref(what), torch.get_num_threads())
    return out


def _takes_tokens(
    qkv: Tensor, cache: Tensor, cos_TR: Tensor | None, heads: QkvOptions, options: AttentionOptions
) -> bool:
    """What `can_attend` leaves open: fp32 projections, a cache in fp32 or bf16, no chunks."""
    kv_heads, _, dim = cache.shape[2:]
    norms = (heads.q_weight, heads.k_weight)
    normed = all(each is None for each in norms) if heads.norm == "none" else _are_plain(*norms)
    group = qkv.shape[1] // (kv_heads * dim) - 2
    simple = not options.chunk and heads.q_scale_T is None and group <= _MOST_GROUP and dim <= _MOST_DIM
    others = [each for each in (cos_TR, options.sinks_N) if each is not None]
    return bool(_is_plain(qkv) and cache.dtype in _CACHES and normed and simple and _are_plain(*others))


def _are_plain(*tensors: Any) -> bool:
    return all(isinstance(each, Tensor) and _is_plain(each) for each in tensors)


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
    pairs = {
        "add_norm": (add_norm(*rows)[0], torch_add_norm(*rows)[0]),
        "activate": (
            activate(rows[0][:, :74].contiguous(), "silu", True),
            torch_activate(rows[0][:, :74], "silu", True),
        ),
        "attend_tokens": (attend_tokens(*tokens), torch_attend_tokens(*tokens)),
    }
    wrong = [name for name, (ours, theirs) in pairs.items() if relative_error(ours, theirs) > _TOLERANCE]
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
