"""fp8 GEMMs: with an fp8 weight, as a custom op (a norm or SwiGLU that writes fp8 rows, then the GEMM), and of any two
quantised operands.

`fp8_matmul` uses our own GEMM kernel, for sizes and dtypes that the library refuses; `library_matmul`
`torch._scaled_mm`. Our kernel loads tiles by TMA; sums stay in the tensor cores' accumulators (`fast`), or are added up
in fp32 after every step.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import ceil_div, fitting_stages, is_bare, on
from armillary.kernels.fp8.linear import E4M3
from armillary.kernels.fp8.matmul import produced
from armillary.kernels.fp8.quantize_triton import quantise, quantise_rows

# M tokens, K inputs of the GEMM, N outputs

_BLOCK_M, _BLOCK_N, _BLOCK_K, _GROUP = 128, 256, 128, 8
_SMALL = 64  # block size for an operand with no more rows


def fp8_matmul(
    x: Tensor,
    weight_NK: Tensor,
    scale: Tensor,
    norm_K: Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
    *,
    library: bool = False,
) -> Tensor:
    """`armillary.kernels.fp8.matmul.reference` with our own GEMM or the library's."""
    return (_launched if is_bare(x) else _matmul)(x, weight_NK, scale, norm_K, gated, eps, library)


library_matmul = partial(fp8_matmul, library=True)


def _launched(
    x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, gated: bool, eps: float, library: bool
) -> Tensor:
    rows = x.flatten(0, -2)
    with on(x):
        if scale.dim():
            a = quantise_rows(rows, E4M3, norm, gated, eps)
        else:  # a per-tensor scale is known only after the whole tensor: nothing to fuse
            a = quantise(produced(rows, norm, gated, eps), E4M3, "tensor")
        b = _padded(weight, a[0].shape[1]), scale
        return multiply(a, b, x.dtype, fast=True, library=library).unflatten(0, x.shape[:-1])


def _padded(weight: Tensor, columns: int) -> Tensor:
    """Padded with zeros to the columns of the activations, which are a multiple of 16."""
    missing = columns - weight.shape[1]
    return F.pad(weight.view(torch.uint8), (0, missing)).view(weight.dtype) if missing else weight


_matmul = torch.library.custom_op("armillary::fp8_matmul", _launched, mutates_args=())


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, gated: bool, eps: float, library: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


# --- GEMMs of quantised operands


def gemm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, stages: int = 4
) -> Tensor:
    """a [M, K] @ bᵀ [K, N] of quantised rows and their scales ([M, 1] and [N, 1], or one number each)."""
    (a_q, a_scale), (b_q, b_scale) = a, b
    (M, K), N = a_q.shape, len(b_q)
    out = torch.empty(M, N, dtype=dtype, device=a_q.device)
    if not out.numel() or not K:
        return out.zero_()
    block_m = _SMALL if M <= _SMALL else _BLOCK_M
    # fp32 sums outside the tensor cores take a second set of registers
    block_n = _SMALL if N <= _SMALL else _BLOCK_N if fast else _BLOCK_N // 2
    stages = fitting_stages(a_q, (block_m + block_n) * _BLOCK_K, stages)
    gemm_kernel[(ceil_div(M, block_m) * ceil_div(N, block_n),)](
        TensorDescriptor.from_tensor(a_q, [block_m, _BLOCK_K]),
        TensorDescriptor.from_tensor(b_q, [block_n, _BLOCK_K]),
        out,
        a_scale,
        b_scale,
        M,
        N,
        K,
        BY_ROW=a_scale.numel() > 1 or a_scale.dim() == 2,
        FAST=fast,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        GROUP=_GROUP,
        STAGES=stages,
        num_warps=8,
    )
    return out


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, library: bool
) -> Tensor:
    """`gemm` by the library or by our own kernel; `fast` keeps sums in the tensor cores' own, shorter accumulators."""
    (a_q, a_scale), (b_q, b_scale) = a, b
    if not library or not a_q.numel():
        return gemm(a, b, dtype, fast=fast)
    return torch._scaled_mm(a_q, b_q.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=dtype, use_fast_accum=fast)


@triton.jit
def gemm_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    BY_ROW: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of the result; consecutive programs share rows of a and b, so these stay in L2."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    row, column = (first + within % height) * BLOCK_M, within // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        a = a_desc.load([row, step * BLOCK_K])
        b = b_desc.load([column, step * BLOCK_K])
        if FAST:
            acc = tl.dot(a, tl.trans(b), acc)
        else:
            acc += tl.dot(a, tl.trans(b))
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    # a per-tensor scale is loaded like per-row scales: with a scalar ptxas serialises the MMAs
    acc *= tl.load(a_scale_ptr + (m if BY_ROW else m * 0), mask=m < M, other=0.0)[:, None]
    acc *= tl.load(b_scale_ptr + (n if BY_ROW else n * 0), mask=n < N, other=0.0)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
