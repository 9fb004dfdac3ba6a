"""Linear functions of the engine: plain weights, or packed ones that run themselves."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.quantized.packed_linear import PackedLinear

LinearFn = Callable[[Tensor], Tensor]


class Dense:
    """x @ weightᵀ + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def linear_fn(linear: nn.Module) -> LinearFn:
    """A packed layer runs itself."""
    if isinstance(linear, PackedLinear):
        return linear
    assert isinstance(linear, nn.Linear)
    return Dense(linear.weight, linear.bias)
