"""Linear layers over int8 and int4 weights on a CPU, which stay packed.

A few tokens go through torch's kernels that convert codes in registers (AVX2, AVX-512 or NEON; inputs in bf16, sums in
fp32). For many tokens a block of the weight at a time is converted to the inputs' dtype and multiplied by the GEMM of
the build (MKL, oneDNN, AMX where there is any). `reference` is the definition; `agrees` compares the two.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.agreement import relative_error

# M tokens, K inputs, N outputs, G groups of inputs with one scale each

DTYPES = (torch.float32, torch.bfloat16)
GROUPS = (256, 128, 64, 32)
"""inputs with one scale that torch's kernel for int4 takes"""
_FEW_INT8, _FEW_INT4 = 32, 64
"""most tokens that are multiplied by codes as they are: one core of a Xeon with AVX-512, 2048 × 2048, 2026-11-18 (int8:
16 tokens 4.4 ms against 9.1 converted, 64 tokens 21 against 14; int4: 64 tokens 15 against 16)"""
_BLOCK_NUMBERS = 1 << 20  # weights converted at a time: 4 MB in fp32
_PACKED_NUMBERS = 1 << 22  # codes packed at a time, which takes 4 bytes each
_TOLERANCE = 1e-2  # of inputs in bf16 against fp32: 2e-3 to 3e-3 were seen
_CHECKED_ROWS = 64
_KERNELS = {
    8: ("_weight_int8pack_mm",),
    4: ("_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu"),
}
"""torch's operators, by bits; builds before 2.6 lack some"""


class IntegerWeight(Protocol):
    """[N, K] as the kernels read it."""

    def __call__(self, x_MK: Tensor) -> Tensor:
        """x @ weightᵀ in x's dtype."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """Signed codes, a scale per row."""

    codes_NK: Tensor
    scale_N: Tensor  # fp32

    @classmethod
    def rounded(cls, weight_NK: Tensor) -> "Int8Weight":
        """Of a plain weight."""
        wide = weight_NK.float()
        scale_N = wide.abs().amax(dim=1).clamp_min(1e-12) / 127
        return cls(codes_NK=(wide / scale_N[:, None]).round().to(torch.int8), scale_N=scale_N)

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes + self.scale_N.nbytes

    def __call__(self, x_MK: Tensor) -> Tensor:
        if len(x_MK) > _FEW_INT8:
            sums = torch.cat([F.linear(x_MK, block.to(x_MK.dtype)) for block in _row_blocks(self.codes_NK)], dim=-1)
        else:
            ones_N = torch.ones(1, dtype=torch.bfloat16).expand(len(self.codes_NK)).contiguous()
            sums = torch.ops.aten._weight_int8pack_mm(x_MK.bfloat16().contiguous(), self.codes_NK, ones_N)
        return (sums * self.scale_N).to(x_MK.dtype)


@dataclass(frozen=True, kw_only=True)
class Int4Weight:
    """(code - 8) · scale + offset, codes in the order of torch's kernel, scale and offset per group in bf16."""

    packed: Tensor  # bytes of N·K / 2
    scales_GN2: Tensor  # scale and offset
    group: int

    @classmethod
    def of(cls, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, group: int) -> "Int4Weight":
        """Of unsigned codes, one per byte."""
        offset = torch.zeros_like(scale_NG) if zero_NG is None else (8 - zero_NG.to(scale_NG.dtype)) * scale_NG
        scales = torch.stack((scale_NG.t(), offset.t()), dim=-1).bfloat16().contiguous()
        return cls(packed=_pack(codes_NK), scales_GN2=scales, group=group)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_GN2.nbytes

    def __call__(self, x_MK: Tensor) -> Tensor:
        rows = tile_rows()
        if len(x_MK) > _FEW_INT4 and rows is not None and len(self.packed) % rows == 0:
            return torch.cat([x_MK @ block for block in self._column_blocks(x_MK.dtype, rows)], dim=-1)
        x = x_MK.bfloat16().contiguous()
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scales_GN2).to(x_MK.dtype)

    def _column_blocks(self, dtype: torch.dtype, rows: int) -> Any:
        """[K, n] of the transposed weight, some tiles of rows at a time."""
        inputs = 2 * self.packed.shape[1]
        tiles = self.packed.view(-1, inputs, rows // 2)
        scales = self.scales_GN2.float().unflatten(1, (-1, rows))  # [G, tiles, rows, 2]
        step = max(1, _BLOCK_NUMBERS // (inputs * rows))
        for first in range(0, len(tiles), step):
            codes = unpack_tiles(tiles[first : first + step]).unflatten(0, (-1, self.group))  # [G, group, tiles, rows]
            scale, offset = scales[:, None, first : first + step].unbind(-1)
            yield codes.mul_(scale).add_(offset - 8 * scale).flatten(0, 1).flatten(1).to(dtype)


def unpack_tiles(tiles_TKr: Tensor) -> Tensor:
    """[K, T, 2r] codes in fp32 of tiles whose bytes hold row i below and row i + r above."""
    half = tiles_TKr.shape[2]
    by_input = tiles_TKr.transpose(0, 1)
    codes = torch.empty(*by_input.shape[:2], 2 * half)
    codes[..., :half] = by_input & 15
    codes[..., half:] = by_input >> 4
    return codes


@cache
def tile_rows() -> int | None:
    """Rows of a tile in the order of torch's kernel, which depends on the instruction set it was built for, found on
    random codes; None for an order that `unpack_tiles` does not know: then few tokens' kernel takes many, too."""
    generator = torch.Generator().manual_seed(0)
    codes_NK = torch.randint(0, 16, (128, 32), generator=generator, dtype=torch.uint8)
    packed = _pack(codes_NK)
    for rows in (64, 32):
        found_KN = unpack_tiles(packed.view(-1, 32, rows // 2)).flatten(1)
        if torch.equal(found_KN.t(), codes_NK.float()):
            return rows
    return None


def _pack(codes_NK: Tensor) -> Tensor:
    """Rows in blocks, a multiple of any tile, because the kernel's own packing wants four bytes per code."""
    step = max(64, _PACKED_NUMBERS // codes_NK.shape[1] // 64 * 64)
    blocks = [codes_NK[row : row + step].int().contiguous() for row in range(0, len(codes_NK), step)]
    return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(block, 1) for block in blocks])


def _row_blocks(codes_NK: Tensor) -> tuple[Tensor, ...]:
    return codes_NK.split(max(1, _BLOCK_NUMBERS // codes_NK.shape[1]))


def takes_int8(rows: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such a weight: rows in fours."""
    return rows % 4 == 0 and dtype in DTYPES and agrees(8, inputs, inputs, dtype)


def int4_group(group: int, rows: int, inputs: int) -> int | None:
    """Inputs per scale that the kernel would take for groups of `group`; None where it takes no such weight."""
    if rows % 16 or inputs % group:
        return None
    return next((each for each in GROUPS if group % each == 0), None)


def reference(x_MK: Tensor, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | float) -> Tensor:
    """x @ ((code - zero) · scale)ᵀ; each scale is for as many consecutive inputs."""
    group = codes_NK.shape[1] // scale_NG.shape[1]
    zero = zero_NG.repeat_interleave(group, dim=1) if isinstance(zero_NG, Tensor) else zero_NG
    return F.linear(x_MK, (codes_NK.float() - zero) * scale_NG.repeat_interleave(group, dim=1))


@cache
def agrees(bits: int, inputs: int, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernels give `reference` here, on random weights and 1, 2 and many tokens; False where torch has
    none for this CPU."""
    if not all(hasattr(torch.ops.aten, name) for name in _KERNELS[bits]):
        return False
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (_CHECKED_ROWS, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand(_CHECKED_ROWS, 1 if bits == 8 else inputs // group, generator=generator) + 0.5
    zero = 128.0 if bits == 8 else torch.randint(0, 16, scale.shape, generator=generator).float()
    x = torch.randn(_FEW_INT4 + 1, inputs, generator=generator).to(dtype)
    expected = reference(x.float(), codes, scale, zero)
    try:
        if bits == 8:
            weight: IntegerWeight = Int8Weight(codes_NK=(codes ^ 128).view(torch.int8), scale_N=scale[:, 0])
        else:
            assert isinstance(zero, Tensor)
            weight = Int4Weight.of(codes, scale, zero, group)
        return all(relative_error(weight(x[:some]), expected[:some]) < _TOLERANCE for some in (1, 2, len(x)))
    except NotImplementedError:  # the operator is known, but not for this CPU
        return False
