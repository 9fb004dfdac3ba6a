"""Weights of a few bits: how each format turns the bytes of some rows back into numbers.

A packed weight [N, K] is a few tensors with N rows each. Rows stand for themselves: they can be selected, permuted and
joined without unpacking. `dequantise` is the definition of a format; kernels are tested against it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from armillary.kernels.quantized.weight_only import FP4 as FP4_VALUES
from armillary.kernels.quantized.weight_only import from_words, nibbles

# n rows, K columns, G groups of columns with one scale each
Rows = dict[str, Tensor]  # each [n, …]


class Format(Protocol):
    """Formats that compare equal can be joined by rows."""

    @property
    def divisible(self) -> bool:
        """Whether adjacent columns can be taken from its tensors, each in proportion."""
        ...

    @property
    def block_columns(self) -> int:
        """Columns that are stored together."""
        ...

    def dequantise(self, rows: Rows) -> Tensor:
        """[n, K] in the dtype that the format's own package computes in."""
        ...


@dataclass(frozen=True)
class _Divisible:
    """A format of which adjacent columns can be taken."""

    @property
    def divisible(self) -> bool:
        return True

    @property
    def block_columns(self) -> int:
        return 1


@dataclass(frozen=True)
class Plain(_Divisible):
    """Floats, for a part of a fused weight that is not quantized."""

    def dequantise(self, rows: Rows) -> Tensor:
        return rows["weight"]


@dataclass(frozen=True, kw_only=True)
class IntGroups(_Divisible):
    """(code - zero) · scale: unsigned codes of 4 or 8 bits, a scale (and zero) per row and `group` of columns."""

    bits: int
    group: int
    zeros: bool  # False: the zero is 2^(bits - 1)
    int8_activations: bool = False  # inputs are meant to be rounded to int8 per token (W8A8)
    words: bool = False  # 4-bit codes are in the order of the kernels, `kernels.quantized.weight_only`

    def dequantise(self, rows: Rows) -> Tensor:
        codes, scale = rows["codes"], rows["scale"]
        values = (_four_bits(codes, self.words) if self.bits == 4 else codes).to(scale.dtype)
        if self.zeros:
            values = values - spread(rows["zero"].to(scale.dtype), self.group, values.shape[1])
        else:
            values = values - (1 << (self.bits - 1))
        return values * spread(scale, self.group, values.shape[1])


@dataclass(frozen=True, kw_only=True)
class Fp8(_Divisible):
    """E4M3 codes with a scale per row and `group` of columns."""

    group: int
    fp8_activations: bool = False  # inputs are meant to be rounded to fp8, with a scale per token (and group)

    def dequantise(self, rows: Rows) -> Tensor:
        codes, scale = rows["codes"].view(torch.float8_e4m3fn), rows["scale"]
        return codes.to(scale.dtype) * spread(scale, self.group, codes.shape[1])


@dataclass(frozen=True, kw_only=True)
class Fp4(_Divisible):
    """E2M1 codes in groups of columns. MXFP4: a power of two per 32. NVFP4: an E4M3 scale per 16, divided by one fp32
    number per tensor."""

    group: int
    powers: bool  # scales are exponents with bias 127
    words: bool = False  # as in IntGroups

    def dequantise(self, rows: Rows) -> Tensor:
        values = lookup_table(FP4_VALUES, rows["codes"].device)[_four_bits(rows["codes"], self.words).int()]
        if self.powers:
            exponents = spread(rows["scale"].int() - 127, self.group, values.shape[1])
            return torch.ldexp(values, exponents)
        scale = rows["scale"].view(torch.float8_e4m3fn).float() / rows["divisor"]
        return values * spread(scale, self.group, values.shape[1])


@dataclass(frozen=True, kw_only=True)
class Lookup4Bit(_Divisible):
    """bitsandbytes' nf4 and fp4: codes into a table of 16, high nibble first, times the largest of each block. Where
    those maxima are quantized too (`nested`): a table of 256, times a second maximum, plus an offset."""

    block: int
    nested_block: int = 0
    nested_offset: float = 0.0
    table: tuple[float, ...] = ()
    nested_table: tuple[float, ...] = ()

    @property
    def divisible(self) -> bool:
        """Nested maxima are numbered from the first of the row."""
        return not self.nested_block

    def dequantise(self, rows: Rows) -> Tensor:
        codes = rows["codes"]
        indices = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1)
        values = lookup_table(self.table, codes.device)[indices.int()]
        return values * spread(self.maxima(rows), self.block, values.shape[1])

    def maxima(self, rows: Rows) -> Tensor:
        """[n, G] in fp32."""
        if not self.nested_block:
            return rows["maximum"]
        table = lookup_table(self.nested_table, rows["maximum"].device)
        blocks = torch.arange(rows["maximum"].shape[1], device=table.device)
        nth = (rows["first"] + blocks) // self.nested_block
        return table[rows["maximum"].int()] * rows["nested_maximum"].gather(1, nth) + self.nested_offset


@dataclass(frozen=True)
class Int8Rows(_Divisible):
    """bitsandbytes' int8: codes times the largest of each row over 127."""

    def dequantise(self, rows: Rows) -> Tensor:
        return rows["codes"].view(torch.int8).float() * rows["maximum"] * (1 / 127)


@cache
def lookup_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, so that nothing is copied to a device inside a step."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _four_bits(codes: Tensor, words: bool) -> Tensor:
    return from_words(codes) if words else nibbles(codes)


def pack_nibbles(codes_nK: Tensor) -> Tensor:
    """The inverse of `nibbles`, for an even number of columns."""
    return codes_nK[..., 0::2] | codes_nK[..., 1::2] << 4


def spread(of_group_nG: Tensor, group: int, columns: int) -> Tensor:
    """[n, K] of one number per group of columns, the last group perhaps shorter; [n, 1] stays as it is."""
    if of_group_nG.shape[1] == 1:
        return of_group_nG
    return of_group_nG.repeat_interleave(group, dim=1)[:, :columns]
