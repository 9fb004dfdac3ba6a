"""Linear layers over packed weights in Triton: a matrix-vector product for one token, tensor cores for a few; for many
the weight is dequantised, some rows at a time, and the library multiplies."""

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, is_bare, power_of_two
from armillary.kernels.gemm.skinny import finished
from armillary.kernels.norm.norm import norm
from armillary.kernels.quantized.dequantise_triton import dequantise
from armillary.kernels.quantized.packed_gemv_triton import PackedGemvTiles, run_gemv
from armillary.kernels.quantized.skinny_packed_triton import PackedSkinnyTiles, run_skinny
from armillary.kernels.quantized.weight_only import MAX_TOKENS, PackedFormat, reference, unsupported
from armillary.machine.accelerator import accelerator_of

# M tokens, K inputs, N rows of the weight

_PROGRAMS = 132  # multiprocessors of the GPU that tiles were chosen for
_WHOLE, _LONGEST = 4096, 16384  # most columns of 4 and of 8 bits that are loaded at once
_DEQUANTISED = 1 << 26  # numbers at a time: 128 MB


def weight_only_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: PackedFormat,
    group: int,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The reference's result; what the kernels do not take goes to the reference."""
    tokens, columns = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    wide = x.dtype not in (torch.bfloat16, torch.float16)
    around = (norm_K, residual, eps, gated, bias_N)
    if wide or not tokens or unsupported(kind, group, columns):
        return reference(x, codes, scale, zero, kind, group, *around)
    return (_launched if is_bare(x) else _op)(x, codes, scale, zero, kind, group, *around)


def _launched(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    group: int,
    norm_K: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    bias_N: Tensor | None,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if len(flat) == 1:
        tiles = gemv_tiles(len(codes), flat.shape[1], kind)
        if accelerator_of(x.device) is None:  # the interpreter's time is that of its programs
            tiles = tiles._replace(rows=64)
        y = run_gemv(flat[0], codes, scale, zero, kind, group, tiles, norm_K, residual, eps, gated, bias_N)
        return y.view(*x.shape[:-1], len(y))
    flat = flat if norm_K is None else norm(flat, norm_K, None, eps)
    if len(flat) > MAX_TOKENS:
        y = _many(flat, codes, scale, zero, kind, group)
    else:
        y = run_skinny(flat, codes, scale, zero, kind, group, skinny_tiles(len(codes), flat.shape[1]))
    y = finished(y if bias_N is None else y + bias_N, residual, gated)
    return y.view(*x.shape[:-1], y.shape[1])


def _many(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int) -> Tensor:
    columns = x.shape[1]
    step, outputs = max(1, _DEQUANTISED // columns), []
    for row in range(0, len(codes), step):
        some = slice(row, row + step)
        of_rows = zero if zero is None or kind == "table" else zero[some]
        outputs.append(F.linear(x, dequantise(codes[some], scale[some], of_rows, kind, group, columns, x.dtype)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


_op = torch.library.custom_op("armillary::weight_only_linear", _launched, mutates_args=())


@_op.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    group: int,
    norm_K: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    bias_N: Tensor | None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(codes) // 2 if gated else len(codes))


def gemv_tiles(outputs: int, inputs: int, kind: str) -> PackedGemvTiles:
    """The fastest on an H200 for the shapes of Llama-3.1-8B (benchmarks/quantized_h200.md): rows of bytes
    are loaded whole, 32 bytes per thread of each; rows of 4 bits in steps of 16 bytes per thread. These are bound by
    arithmetic, so that a norm inside, which every program computes again, would cost time."""
    padded = max(128, power_of_two(inputs))
    few = outputs < 16 * _PROGRAMS  # rows: then more programs share them
    if kind in ("int8", "fp8"):
        depth = min(padded, _LONGEST)
        return PackedGemvTiles(rows=2 if few else 4, depth=depth, warps=max(1, depth // 1024), norm_inside=False)
    depth, rows = min(padded, _WHOLE), 8 if kind == "int4" and not few else 4
    return PackedGemvTiles(rows=rows, depth=depth, warps=max(1, depth // 1024), norm_inside=False)


def skinny_tiles(outputs: int, inputs: int) -> PackedSkinnyTiles:
    """Splits of the inner dim, so that there are about two programs per multiprocessor."""
    tiles = ceil_div(outputs, 64)
    return PackedSkinnyTiles(splits=max(1, min(2 * _PROGRAMS // tiles, inputs // 1024)))
