"""Experts of a layer in MXFP4, stacked as GPT-OSS is published."""

from typing import NamedTuple

import torch
from torch import Tensor

from armillary.kernels.quantized.weight_only import FP4

# E experts, N outputs, K inputs

GROUP = 32
"""inputs with one exponent"""


class Fp4Stack(NamedTuple):
    """Weights [E, N, K]."""

    codes_ENB: Tensor  # uint8 [E, N, K / 2]: E2M1 codes, of two columns the first in the low nibble
    scale_ENG: Tensor  # uint8 [E, N, K / 32]: exponents with bias 127

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, width = self.codes_ENB.shape
        return experts, rows, 2 * width

    @property
    def itemsize(self) -> float:
        """Bytes of a weight."""
        return 0.5 + 1 / GROUP

    def contiguous(self) -> "Fp4Stack":
        return Fp4Stack(self.codes_ENB.contiguous(), self.scale_ENG.contiguous())

    def select(self, experts_M: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, N, K] of some experts."""
        codes, exponents = self.codes_ENB[experts_M], self.scale_ENG[experts_M].int() - 127
        numbers = torch.tensor(FP4, dtype=torch.float64, device=codes.device)
        values = numbers[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]
        return torch.ldexp(values, exponents.repeat_interleave(GROUP, dim=-1)).to(dtype)


def select_experts(weight: Tensor | Fp4Stack, experts_M: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N, K]"""
    return weight.select(experts_M, dtype) if isinstance(weight, Fp4Stack) else weight[experts_M]
