"""Keys and values as the 8-bit codes of a quantized cache: number ≈ code · scale."""

import torch
from torch import Tensor

CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def largest_code(dtype: torch.dtype) -> float:
    """Codes of int8 are symmetric: -127 to 127."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def to_codes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest; what is beyond the range becomes the largest code."""
    largest = largest_code(dtype)
    codes = (x / scale).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype)
