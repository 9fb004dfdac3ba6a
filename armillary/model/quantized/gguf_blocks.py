"""The blocks of GGUF files, dequantised as the gguf package does, bit for bit.

Rows of `blocks` are those of the file: blocks of 32 or 256 numbers with their scales (ggml-common.h in
github.com/ggml-org/ggml). All arithmetic is in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.model.quantized.formats import Rows
from armillary.store.gguf.gguf_header import BLOCKS

# b blocks


@dataclass(frozen=True, kw_only=True)
class GgufBlocks:
    """Rows of a GGUF tensor."""

    kind: str

    @property
    def divisible(self) -> bool:
        return True

    @property
    def block_columns(self) -> int:
        return BLOCKS[self.kind][0]

    def dequantise(self, rows: Rows) -> Tensor:
        raw = rows["blocks"]
        if self.kind in _FLOATS:
            return raw.contiguous().view(_FLOATS[self.kind]).float()
        blocks = raw.reshape(-1, BLOCKS[self.kind][1])
        return _DEQUANTISE[self.kind](blocks).view(len(raw), -1)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def halves(two_bytes: Tensor) -> Tensor:
    """[b, 1] of an fp16 number per block."""
    return two_bytes.contiguous().view(torch.float16)


def _half(two_bytes: Tensor) -> Tensor:
    return halves(two_bytes).float()


def _split_nibbles(bytes_bn: Tensor, run: int) -> Tensor:
    """Low nibbles of each run of bytes, then its high ones: [b, runs · 2, run]."""
    runs = bytes_bn.unflatten(1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1, 2)


def q8_0_codes(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8)


def q4_0_codes(blocks: Tensor) -> Tensor:
    """[b, 32], 8 too large."""
    return _split_nibbles(blocks[:, 2:], 16).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    return q8_0_codes(blocks).float() * _half(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (q4_0_codes(blocks).float() - 8)


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[b, 8] each, of Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes."""
    a, b, c = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), dim=1)
    return scales, torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), dim=1)


def q4_k_codes(blocks: Tensor) -> Tensor:
    """[b, 8, 32]"""
    return _split_nibbles(blocks[:, 16:], 32)


def q5_k_codes(blocks: Tensor) -> Tensor:
    """[b, 8, 32]"""
    fifth = _bits(blocks[:, 16:48][:, None, None], range(8), 1)
    return _split_nibbles(blocks[:, 48:], 32) | fifth << 4


def q6_k_codes(blocks: Tensor) -> Tensor:
    """[b, 256], 32 too large."""
    low = _split_nibbles(blocks[:, :128], 64)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 1, 32)), range(0, 8, 2), 3)
    return (low.unflatten(2, (2, 32)).flatten(1, 2) | high << 4).flatten(1)


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """An fp16 number per block times the scale of each 32, and another times the minimum."""
    scales, minima = scales_and_minima(blocks)
    scale, minimum = _half(blocks[:, :2]) * scales.float(), _half(blocks[:, 2:4]) * minima.float()
    return scale[..., None] * codes.float() - minimum[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, q4_k_codes(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, q5_k_codes(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    codes = q6_k_codes(blocks).to(torch.int8) - 32
    return scale[..., None] * codes.unflatten(1, (16, 16)).float()


def _bits(bytes_br1n: Tensor, shifts: range, mask: int) -> Tensor:
    """[b, runs · shifts, n] of runs of bytes [b, runs, 1, n]: the same bits of all bytes of a run, shift by shift."""
    start, stop, step = shifts.start, shifts.stop, shifts.step
    amounts = torch.arange(start, stop, step, dtype=torch.uint8, device=bytes_br1n.device)[:, None]  # nothing is copied
    return ((bytes_br1n >> amounts) & mask).flatten(1, 2)


_DEQUANTISE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
