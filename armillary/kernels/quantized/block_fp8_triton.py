"""Block-scaled fp8 GEMMs: a kernel quantises tokens by groups of 128 inputs, then comes cuBLASLt's GEMM through torch,
or our own, which multiplies the sums of each 128 inputs by their scales in fp32."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import ceil_div, fitting_stages, is_bare, on

# M tokens, K inputs, N outputs


@dataclass(frozen=True, kw_only=True)
class BlockFp8Tiles:
    """Tile sizes of our own GEMM; a step is always 128 inputs."""

    rows: int = 128  # tokens
    columns: int = 128  # outputs, at most 128: one scale per step
    stages: int = 4
    warps: int = 8
    group: int = 8  # tiles of tokens that follow each other


def block_fp8_linear(
    x: Tensor, codes_NK: Tensor, scale: Tensor, *, library: bool = False, tiles: BlockFp8Tiles | None = None
) -> Tensor:
    """`armillary.kernels.quantized.block_fp8.reference` with our own GEMM or the library's."""
    if not x.numel() or tiles is not None:
        return _launched(x, codes_NK, scale, library, tiles)
    return (_launched if is_bare(x) else _op)(x, codes_NK, scale, library)


library_linear = partial(block_fp8_linear, library=True)


def _launched(x: Tensor, codes: Tensor, scale: Tensor, library: bool, tiles: BlockFp8Tiles | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not len(rows):
        return x.new_empty(*x.shape[:-1], len(codes))
    with on(x):
        numbers, of_token = quantise_tokens(rows)
        if library:
            y = library_gemm(numbers, of_token, codes, scale, x.dtype)
        else:
            y = gemm(numbers, of_token, codes, scale, x.dtype, tiles or BlockFp8Tiles())
    return y.unflatten(0, x.shape[:-1])


def _plain(x: Tensor, codes: Tensor, scale: Tensor, library: bool) -> Tensor:
    return _launched(x, codes, scale, library)


_op = torch.library.custom_op("armillary::block_fp8_linear", _plain, mutates_args=())


@_op.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, library: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(codes))


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [M, K] and scales [M, K / 128], tokens of one group beside each other as GEMMs read them."""
    M, K = x.shape
    numbers = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(K // 128, M, dtype=torch.float32, device=x.device).t()
    block = 32
    quantise_kernel[(ceil_div(M, block), K // 128)](x, numbers, scale, M, K, BLOCK_M=block, num_warps=4)
    return numbers, scale


@triton.jit
def quantise_kernel(x_ptr, out_ptr, scale_ptr, M, K, BLOCK_M: tl.constexpr):
    """Program (tokens, group)."""
    m, group = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    at = m.to(tl.int64)[:, None] * K + group * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=m[:, None] < M, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 448.0
    tl.store(out_ptr + at, (x / scale[:, None]).to(out_ptr.dtype.element_ty), mask=m[:, None] < M)
    tl.store(scale_ptr + group.to(tl.int64) * M + m, scale, mask=m < M)


def library_gemm(numbers: Tensor, of_token: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """torch chooses the scaling by the shapes and strides of scales; rows of block scales are a multiple of 4 long."""
    if len(scale) == len(codes):
        of_weight = scale.t().contiguous()
    else:
        missing = -scale.shape[1] % 4
        of_weight = (torch.nn.functional.pad(scale, (0, missing))[:, : scale.shape[1]] if missing else scale).t()
    y: Any = torch._scaled_mm(numbers, codes.t(), scale_a=of_token, scale_b=of_weight, out_dtype=torch.bfloat16)
    return y.to(dtype)  # type: ignore[no-any-return]


def gemm(
    numbers: Tensor, of_token: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype, tiles: BlockFp8Tiles
) -> Tensor:
    (M, K), N = numbers.shape, len(codes)
    out = torch.empty(M, N, dtype=dtype, device=numbers.device)
    grid = ceil_div(M, tiles.rows) * ceil_div(N, tiles.columns)
    by_row = len(scale) == N
    stages = fitting_stages(numbers, (tiles.rows + tiles.columns) * 128, tiles.stages)
    block_gemm_kernel[(grid,)](
        TensorDescriptor.from_tensor(numbers, [tiles.rows, 128]),
        TensorDescriptor.from_tensor(codes, [tiles.columns, 128]),
        out,
        of_token,
        scale.t().contiguous() if by_row else scale,
        M,
        N,
        K,
        BY_ROW=by_row,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        GROUP=tiles.group,
        STAGES=stages,
        num_warps=tiles.warps,
    )
    return out


@triton.jit
def block_gemm_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    BY_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of the result; consecutive programs share rows of a and b, so these stay in L2. Scales of rows lie with
    those of one step beside each other."""
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    row, column = (first + within % height) * BLOCK_M, within // height * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    steps = K // 128
    b_scales = b_scale_ptr + column // 128 * steps
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        a = a_desc.load([row, step * 128])
        b = b_desc.load([column, step * 128])
        scale = tl.load(a_scale_ptr + step * M + m, mask=m < M, other=0.0)
        if BY_ROW:
            of_row = tl.load(b_scale_ptr + step * N + n, mask=n < N, other=0.0)
            acc += tl.dot(a, tl.trans(b)) * scale[:, None] * of_row[None, :]
        else:
            acc += tl.dot(a, tl.trans(b)) * (scale * tl.load(b_scales + step))[:, None]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
