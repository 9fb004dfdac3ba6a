"""Copies of fp32 parameters in a half format, for matrix products: made once a step instead of once a micro-batch.

The parameters stay the truth. A copy remembers the version of the parameter it was made from and is made anew when the
parameter was written since (a load, another optimiser); AdamW of our own writes both at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Weights16Bit:
    """Copies of the parameters that were asked for, by parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The copy, without a gradient; the parameter itself where it is in that format already."""
        if parameter.dtype == self.dtype:
            return parameter.detach()
        if self._versions.get(parameter) != parameter._version:
            self._make(parameter)
        return self.copies[parameter]

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        """The copy, through which gradients reach the parameter."""
        copy = self.of(parameter)
        return _Standing.apply(parameter, copy) if parameter.requires_grad else copy  # type: ignore[no-any-return]

    @torch.no_grad()
    def _make(self, parameter: nn.Parameter) -> None:
        if parameter in self.copies:
            self.copies[parameter].copy_(parameter)
        else:
            self.copies[parameter] = parameter.to(self.dtype)
        self._versions[parameter] = parameter._version


class _Standing(torch.autograd.Function):
    """The copy for the parameter: nothing is computed, the gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
