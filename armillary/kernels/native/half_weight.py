"""A plain weight in bf16 on a CPU without bf16 units, where the model's dtype is fp32: the values are the same, and one
token reads half the bytes. `armillary/kernels/native/half_linear.cpp` multiplies a few tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.native.library import library

# N outputs, K inputs, M tokens

_LANES = 16
_MOST_TOKENS = 16  # more are multiplied by blocks of the weight in fp32
_BLOCK_NUMBERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HalfWeight:
    """Call it with x [M, K] in fp32 for x @ weightᵀ + bias."""

    weight_NK: Tensor  # bf16
    bias: Tensor | None
    kernels: Any

    @classmethod
    def of(cls, weight_NK: Tensor, bias: Tensor | None = None) -> "HalfWeight | None":
        """Of a weight in fp32; None where bf16 does not hold it exactly, or no kernel takes it."""
        kernels = library()
        plain = weight_NK.dtype == torch.float32 and weight_NK.shape[1] % _LANES == 0 and weight_NK.is_contiguous()
        if kernels is None or not plain:
            return None
        half, step = weight_NK.detach().bfloat16(), max(1, _BLOCK_NUMBERS // weight_NK.shape[1])
        blocks = zip(half.split(step), weight_NK.split(step), strict=True)
        if not all(torch.equal(block.float(), wide) for block, wide in blocks):
            return None
        return cls(weight_NK=half, bias=None if bias is None else bias.detach().float(), kernels=kernels)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > _MOST_TOKENS:
            step = max(1, _BLOCK_NUMBERS // self.weight_NK.shape[1])
            y = torch.cat([F.linear(x, block.to(x.dtype)) for block in self.weight_NK.split(step)], dim=-1)
            return y if self.bias is None else y + self.bias
        wide, (rows, columns) = x.float().contiguous(), self.weight_NK.shape
        y = torch.empty(len(x), rows)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        self.kernels.armillary_half_linear(
            self.weight_NK.data_ptr(),
            wide.data_ptr(),
            len(x),
            rows,
            columns,
            bias_at,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y.to(x.dtype)
