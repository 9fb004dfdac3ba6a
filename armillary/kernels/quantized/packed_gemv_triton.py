"""One token through a packed weight in Triton: the kernel for its codes, and its tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.launch import can_start_early, ceil_div, dense, early_launch, on
from armillary.kernels.gemm.skinny_triton import normed
from armillary.kernels.quantized.gemv_4bit_triton import gemv4_kernel
from armillary.kernels.quantized.gemv_8bit_triton import gemv8_kernel

# N rows, K columns

_MAGIC = 0x43004300
"""twice 128 in bf16; handed to kernels in a register, so that mask and magic number are one instruction"""


class PackedGemvTiles(NamedTuple):
    """Tile sizes for one token."""

    rows: int  # of the weight per program, even
    depth: int  # columns per step
    warps: int
    early: bool = True  # start before the previous kernel has ended, where the GPU can
    norm_inside: bool = True  # else a kernel of its own comes before


def run_gemv(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    group: int,
    tiles: PackedGemvTiles,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """One token x [K] through codes [N, …]; the result is [N] in x's dtype, [N / 2] where gated."""
    N, K, four_bits = len(codes), x.numel(), kind not in ("int8", "fp8")
    out = x.new_empty(N // 2 if gated else N)
    early = can_start_early(x.device) and tiles.early
    kernel = gemv4_kernel if four_bits else gemv8_kernel
    norm, residual, bias = (dense(each) for each in (norm, residual, bias))
    with on(x):
        if norm is not None and not tiles.norm_inside:
            x, norm = normed(x[None], norm, eps, early)[0], None
        if norm is not None and four_bits:
            norm = norm.to(x.dtype).view(torch.int32)
        kernel[(ceil_div(N, tiles.rows),)](
            x.view(torch.int32) if four_bits else x,  # 4-bit codes meet pairs of inputs
            codes,
            scale,
            zero,
            norm,
            bias,
            residual,
            out,
            N,
            K // 8 if four_bits else K,
            scale.shape[1],
            _MAGIC,
            1 << 16,
            eps,
            EARLY=early,
            HAS_NORM=norm is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            GATED=gated,
            KIND=kind,
            ZEROS=zero is not None and kind not in ("nvfp4", "table"),
            BY_ROW=scale.shape[1] == 1,
            GROUP=group,
            EVEN=K % tiles.depth == 0,
            ONCE=tiles.depth >= K,
            ROWS=tiles.rows,
            DEPTH=tiles.depth,
            num_warps=tiles.warps,
            **early_launch(early),
        )
    return out
