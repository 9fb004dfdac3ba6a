"""GGUF's K-quants in the order of the GPU kernels: 256 columns with one or two fp16 numbers, times a scale (and a
minimum) of a few bits per 32 or 16 of them.

Q4_K, Q5_K: code · d · scale - dmin · minimum, per 32 columns. Q6_K: (code - 32) · d · scale, per 16.

`codes` [N, …] int32: a row's low four bits in words (`weight_only`), then what is above them: for word w, a byte with
the fifth bit of its nibble p at bit p, or 16 bits with two of nibble p at bit 2·p.
`scale` [N, …] bytes: a row's scales, then minima, a byte each, then d (and dmin) of each 256 columns in fp16.
"""

import torch
from torch import Tensor

# N rows, K columns, W = K / 8 words, S = K / 256 blocks

BLOCK = 256
SPAN = 4
"""words in one block of `weight_only.to_words`"""
HIGH_BITS = {"q4_k": 0, "q5_k": 1, "q6_k": 2}
"""of a code, above the low four"""
GROUP = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
"""columns with one scale"""
_MIDDLE = 32  # of Q6_K


def code_words(kind: str, columns: int) -> int:
    """int32 words of a row's codes."""
    return columns // 8 + HIGH_BITS[kind] * columns // 32


def scale_bytes(kind: str, columns: int) -> int:
    """Of a row."""
    return columns // 16 + columns // BLOCK * (2 if kind == "q6_k" else 4)


def row_bytes(kind: str, columns: int) -> int:
    return 4 * code_words(kind, columns) + scale_bytes(kind, columns)


def packed(codes_NK: Tensor, low_NW: Tensor, kind: str) -> Tensor:
    """`codes` of the format; `low_NW` are the words of the low four bits."""
    bits = HIGH_BITS[kind]
    if not bits:
        return low_NW
    blocks = (codes_NK >> 4).int().unflatten(1, (-1, 4, SPAN, 2))  # block, j, i, h
    nibbles = blocks.permute(0, 1, 3, 4, 2).flatten(3).flatten(1, 2)  # [N, W, 8]
    shifts = bits * torch.arange(8, device=codes_NK.device, dtype=torch.int32)
    high_NW = (nibbles << shifts).sum(-1, dtype=torch.int32).to(torch.uint8 if bits == 1 else torch.int16)
    return torch.cat((low_NW, high_NW.view(torch.int32)), dim=1)


def low_words(codes: Tensor, kind: str) -> Tensor:
    """[N, W] of the low four bits."""
    return codes[:, : codes.shape[1] * 4 // (4 + HIGH_BITS[kind])]


def _high(codes: Tensor, num_words: int, kind: str) -> Tensor:
    """[N, K] of what is above the low four bits."""
    bits = HIGH_BITS[kind]
    high_NW = codes[:, num_words:].contiguous().view(torch.uint8 if bits == 1 else torch.int16).int()
    shifts = bits * torch.arange(8, device=codes.device, dtype=torch.int32)
    nibbles = high_NW[..., None] >> shifts & (1 << bits) - 1
    return nibbles.unflatten(1, (-1, SPAN)).unflatten(3, (2, 4)).permute(0, 1, 4, 2, 3).flatten(1).to(torch.uint8)


def dequantised(low_NK: Tensor, codes: Tensor, scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """[N, K], of the unpacked low four bits and the tensors of the format; bit-equal to the gguf package in fp32."""
    columns = low_NK.shape[1]
    groups = columns // GROUP[kind]
    halves = scale[:, columns // 16 :].contiguous().view(torch.float16).to(dtype)
    numbers = low_NK
    if HIGH_BITS[kind]:
        numbers = numbers | _high(codes, columns // 8, kind) << 4
    if kind == "q6_k":
        of_group = _spread(halves, groups) * scale[:, :groups].view(torch.int8).to(dtype)
        return _spread(of_group, columns) * (numbers.to(dtype) - _MIDDLE)
    of_group = _spread(halves[:, 0::2], groups) * scale[:, :groups].to(dtype)
    minimum = _spread(halves[:, 1::2], groups) * scale[:, groups : 2 * groups].to(dtype)
    return _spread(of_group, columns) * numbers.to(dtype) - _spread(minimum, columns)


def _spread(numbers: Tensor, columns: int) -> Tensor:
    return numbers.repeat_interleave(columns // numbers.shape[1], dim=1)


def random_weight(kind: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(codes, scale) of numbers as those of a linear layer."""
    (rows, columns), device = shape, generator.device

    def drawn(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (rows, size), generator=generator, device=device)

    codes = drawn(-(1 << 31), 1 << 31, code_words(kind, columns)).int()
    groups, blocks = columns // GROUP[kind], columns // BLOCK
    if kind == "q6_k":
        levels, largest = drawn(-128, 128, groups).to(torch.int8).view(torch.uint8), 64 * 20
    else:
        levels, largest = drawn(0, 64, 2 * groups).to(torch.uint8), 32 * (8 << HIGH_BITS[kind])
    random = torch.rand(rows, blocks, 1 if kind == "q6_k" else 2, generator=generator, device=device)
    halves = ((random + 0.5) / (largest * columns**0.5)).flatten(1).half()
    if kind != "q6_k":
        halves[:, 1::2] *= 8 << HIGH_BITS[kind]  # codes are above 0, minima in their middle
    return codes, torch.cat((levels, halves.view(torch.uint8)), dim=1)
