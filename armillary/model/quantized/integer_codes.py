"""Packed weights of every format with integer codes, as the C++ kernels of CPUs take them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from armillary.kernels.native.packed_weight import Codes
from armillary.kernels.quantized.weight_only import nibbles
from armillary.model.quantized import gguf_blocks as gguf
from armillary.model.quantized.formats import Fp4, Int8Rows, IntGroups, Rows
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.packed_rows import PackedRows
from armillary.store.gguf.gguf_header import BLOCKS

_STEP_NUMBERS = 1 << 22  # weights unpacked at a time, a byte each


def codes_of(part: PackedRows) -> Codes | None:
    """All rows; None for a format without integer codes, and for codes in the order of the GPU kernels."""
    match part.format:
        case IntGroups(words=False):
            return _of_groups(part, part.format)
        case Int8Rows():
            scale = part.rows["maximum"].float().view(-1, 1) / 127
            return Codes(codes_NK=part.rows["codes"] ^ 128, bits=8, group=part.columns, scale_NG=scale, zero=128)
        case Fp4(words=False):
            return _of_fp4(part.rows, part.format)
        case GgufBlocks(kind=kind) if kind in _GGUF:
            blocks = part.rows["blocks"]
            return _GGUF[kind](blocks.reshape(-1, BLOCKS[kind][1]), len(blocks))
    return None


def pieces(part: PackedRows) -> Iterator[Codes]:
    """The same, some rows at a time."""
    step = max(1, _STEP_NUMBERS // part.columns // 64) * 64
    for row in range(0, part.num_rows, step):
        codes = codes_of(part.select(slice(row, row + step)))
        assert codes is not None
        yield codes


def _of_groups(part: PackedRows, format: IntGroups) -> Codes:
    codes, scale = part.rows["codes"], part.rows["scale"]
    return Codes(
        codes_NK=nibbles(codes) if format.bits == 4 else codes,
        bits=format.bits,
        group=part.columns if scale.shape[1] == 1 else format.group,
        scale_NG=scale,
        zero=1 << (format.bits - 1),
        zero_NG=part.rows["zero"].to(torch.uint8) if format.zeros else None,
        inputs="token" if format.int8_activations and scale.shape[1] == 1 and not format.zeros else "chunk",
    )


def _of_fp4(rows: Rows, format: Fp4) -> Codes:
    codes = Codes(codes_NK=nibbles(rows["codes"]), bits=4, group=format.group, scale_NG=rows["scale"], fp4="e8m0")
    if format.powers:
        return codes
    divisor = rows["divisor"].float().reshape(-1, 1).expand(len(rows["codes"]), 1)
    return replace(codes, fp4="e4m3", super_NS=0.5 / divisor)


def _halves(blocks: Tensor, first: int, rows: int) -> Tensor:
    return blocks[:, first : first + 2].contiguous().view(torch.float16).view(rows, -1)


def _q8_0(blocks: Tensor, rows: int) -> Codes:
    codes = gguf.q8_0_codes(blocks).view(torch.uint8) ^ 128
    scale = _halves(blocks, 0, rows)
    return Codes(codes_NK=codes.view(rows, -1), bits=8, group=32, scale_NG=scale, zero=128, inputs="half chunk")


def _q4_0(blocks: Tensor, rows: int) -> Codes:
    codes = gguf.q4_0_codes(blocks).view(rows, -1)
    scale = _halves(blocks, 0, rows)
    return Codes(codes_NK=codes, bits=4, group=32, scale_NG=scale, zero=8, inputs="half chunk")


def _with_minima(blocks: Tensor, rows: int, codes: Tensor, bits: int) -> Codes:
    scales, minima = gguf.scales_and_minima(blocks)
    return Codes(
        codes_NK=codes.reshape(rows, -1),
        bits=bits,
        group=32,
        scale_NG=scales.view(rows, -1),
        super_NS=_halves(blocks, 0, rows),
        minimum_NG=minima.view(rows, -1),
        super_minimum_NS=_halves(blocks, 2, rows),
        inputs="super",
    )


def _q6_k(blocks: Tensor, rows: int) -> Codes:
    return Codes(
        codes_NK=gguf.q6_k_codes(blocks).view(rows, -1),
        bits=6,
        group=16,
        scale_NG=blocks[:, 192:208].contiguous().view(torch.int8).view(rows, -1),
        super_NS=_halves(blocks, 208, rows),
        zero=32,
        inputs="super",
    )


_GGUF: dict[str, Callable[[Tensor, int], Codes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": lambda blocks, rows: _with_minima(blocks, rows, gguf.q4_k_codes(blocks), 4),
    "Q5_K": lambda blocks, rows: _with_minima(blocks, rows, gguf.q5_k_codes(blocks), 5),
    "Q6_K": _q6_k,
}
