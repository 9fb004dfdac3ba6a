"""16-bit copies of fp32 parameters for GEMMs, made once per step instead of once per micro-batch.

The parameters are the master weights. A copy remembers the version of the parameter it was made from and is refreshed
when the parameter has been written since (a load, another optimizer); our AdamW writes both at once.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Weights16Bit:
    """Copies of the parameters that were requested, by parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The copy, without a gradient; the parameter itself where it has that dtype already."""
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
    """The copy in place of the parameter: nothing is computed, the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
