"""Packed weights in the order of the GPU kernels: which formats these know, and how a weight is put into their order,
in no more than 1.05 times its memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.kernels.quantized import k_quants
from armillary.kernels.quantized.weight_only import WeightFormat, dequantised, nibbles, to_words
from armillary.model.quantized import gguf_blocks as gguf
from armillary.model.quantized.formats import Fp4, Fp8, Int8Rows, IntGroups, Lookup4Bit, Rows, lookup_table
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.packed_rows import PackedRows
from armillary.store.gguf.gguf_header import BLOCKS

_STEP_NUMBERS = 1 << 24  # weights reordered at a time
_HALF_DIGITS = 2.0**-10  # of a scale that becomes fp16
_GGUF = {
    "Q4_0": WeightFormat("int4", 32),
    "Q8_0": WeightFormat("int8", 32),
    "Q4_K": WeightFormat("q4_k", k_quants.GROUP["q4_k"]),
    "Q5_K": WeightFormat("q5_k", k_quants.GROUP["q5_k"]),
    "Q6_K": WeightFormat("q6_k", k_quants.GROUP["q6_k"]),
}


@dataclass(frozen=True, kw_only=True)
class KernelOrder:
    """A weight that lies as the kernels read it (`kernels.quantized.weight_only`). All arithmetic is in fp32, as that
    of the package whose format it had."""

    format: WeightFormat
    table: tuple[float, ...] = ()

    @property
    def divisible(self) -> bool:
        return False

    @property
    def block_columns(self) -> int:
        return 1

    def dequantise(self, rows: Rows) -> Tensor:
        codes = rows["codes"]
        table = lookup_table(self.table, codes.device) if self.table else None
        return dequantised(codes, rows["scale"], table, self.format.kind, self.format.group)


def kernel_format(part: PackedRows) -> WeightFormat | None:
    """None for a format that kernels do not know."""
    match part.format:
        case IntGroups(bits=4, zeros=zeros, group=group):
            format = WeightFormat("int4", group, zeros)
        case IntGroups(bits=8, zeros=zeros, group=group):
            format = WeightFormat("int8", group, zeros)
        case Fp8(group=group):
            format = WeightFormat("fp8", group)
        case Fp4(group=group, powers=powers):
            format = WeightFormat("mxfp4" if powers else "nvfp4", group)
        case Int8Rows():
            return WeightFormat("int8", 0)
        case Lookup4Bit(block=block):
            return WeightFormat("table", block)
        case GgufBlocks(kind=kind):
            return _GGUF.get(kind)
        case KernelOrder(format=format):
            return format
        case _:
            return None
    return format._replace(group=0) if part.rows["scale"].shape[1] == 1 else format


def for_kernels(part: PackedRows) -> PackedRows | None:
    """In the order of the kernels; what lies in it already stays as it is. None where a scale would lose digits."""
    match part.format:
        case IntGroups(bits=4, words=False) | Fp4(words=False):
            words = _by_rows(lambda some: to_words(nibbles(some)), part.rows["codes"], part.columns)
            return replace(part, format=replace(part.format, words=True), rows=part.rows | {"codes": words})
        case Int8Rows():
            return as_groups(part)
        case Lookup4Bit():
            return _with_table(part, part.format)
        case GgufBlocks(kind=kind) if kind in _GGUF:
            steps = [_of_gguf(part.select(rows), kind) for rows in _steps(part)]
            rows = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
            return replace(part, format=KernelOrder(format=_GGUF[kind]), rows=rows)
    return part


def as_groups(part: PackedRows) -> PackedRows:
    """bitsandbytes' int8 as codes of a byte with a scale per row; others as they are."""
    if not isinstance(part.format, Int8Rows):
        return part
    codes = _by_rows(lambda some: some ^ 128, part.rows["codes"], part.columns)
    rows = {"codes": codes, "scale": part.rows["maximum"].view(-1, 1) / 127}
    return replace(part, format=IntGroups(bits=8, group=part.columns, zeros=False), rows=rows)


def _with_table(part: PackedRows, format: Lookup4Bit) -> PackedRows | None:
    """High nibbles come first; nested maxima become fp16 numbers, 2 bytes a block for 1."""
    words = _by_rows(lambda some: to_words(nibbles(some >> 4 | some << 4)), part.rows["codes"], part.columns)
    scale = format.maxima(part.rows)
    if format.nested_block:
        exact, scale = scale, scale.half()
        if bool(((scale.float() - exact).abs() > _HALF_DIGITS * exact.abs()).any()):
            return None
    order = KernelOrder(format=WeightFormat("table", format.block), table=format.table)
    return replace(part, format=order, rows={"codes": words, "scale": scale})


def _of_gguf(part: PackedRows, kind: str) -> Rows:
    """Some rows; every tensor has as many bytes as the file, K-quants of 4 and 5 bits 4 more for each 256 numbers."""
    blocks, rows = part.rows["blocks"].reshape(-1, BLOCKS[kind][1]), part.num_rows
    if kind == "Q8_0":
        codes = gguf.q8_0_codes(blocks).view(torch.uint8) ^ 128
        return {"codes": codes.view(rows, -1), "scale": gguf.halves(blocks[:, :2]).view(rows, -1)}
    if kind == "Q4_0":
        return {
            "codes": to_words(gguf.q4_0_codes(blocks).view(rows, -1)),
            "scale": gguf.halves(blocks[:, :2]).view(rows, -1),
        }
    codes = _K_CODES[kind](blocks).reshape(rows, -1)
    low = to_words(codes & 15, k_quants.SPAN)
    return {"codes": k_quants.packed(codes, low, kind.lower()), "scale": _two_levels(blocks, rows, kind)}


_K_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_K": gguf.q4_k_codes,
    "Q5_K": gguf.q5_k_codes,
    "Q6_K": gguf.q6_k_codes,
}


def _two_levels(blocks: Tensor, rows: int, kind: str) -> Tensor:
    """Scales of groups, their minima, and fp16 numbers of blocks, in bytes."""
    if kind == "Q6_K":
        return torch.cat((blocks[:, 192:208].reshape(rows, -1), blocks[:, 208:].reshape(rows, -1)), dim=1)
    scales, minima = gguf.scales_and_minima(blocks)
    return torch.cat((scales.view(rows, -1), minima.view(rows, -1), blocks[:, :4].reshape(rows, -1)), dim=1)


def _by_rows(change: Callable[[Tensor], Tensor], tensor: Tensor, columns: int) -> Tensor:
    """Some rows at a time."""
    step = max(1, _STEP_NUMBERS // columns)
    return torch.cat([change(tensor[row : row + step]) for row in range(0, len(tensor), step)])


def _steps(part: PackedRows) -> list[slice]:
    step = max(1, _STEP_NUMBERS // part.columns)
    return [slice(row, row + step) for row in range(0, part.num_rows, step)]
