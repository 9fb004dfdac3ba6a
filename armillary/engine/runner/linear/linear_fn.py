"""Linear functions of the engine: plain weights, or packed ones that run themselves."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.layers.norm import Norm
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


def run_fused(
    linear: LinearFn | None,
    x: Tensor,
    small: Callable[..., Tensor] | None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """residual + act(norm(x) @ weightᵀ + bias), each part only where it is given; `small` is for plain weights."""
    weight, eps = (None, 1e-6) if norm is None else (norm.weight, norm.eps)
    if isinstance(linear, PackedLinear):
        return linear.run_fused(x, weight, residual, eps, gated)
    assert isinstance(linear, Dense) and small is not None
    return small(x, linear.weight, weight, residual, eps, gated, linear.bias)
