"""Weights and activations in 8 bits on a CPU: a scale for every row of a weight and for every token, sums in int32.

Scales are of a token alone, so an answer does not depend on what stands beside it in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.serving.engine.layer import Dense, Layer, Product


class Int8Dense:
    """x @ weightᵀ + bias with both factors rounded to 8 bits."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None) -> None:
        wide = weight_NK.detach().float()
        self.scale_N = wide.abs().amax(dim=1).clamp_min(1e-12) / 127
        self.weight_KN = (wide / self.scale_N[:, None]).round().to(torch.int8).t()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale_T1 = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
        sums = torch._int_mm((wide / scale_T1).round().to(torch.int8), self.weight_KN)
        y = sums.float() * scale_T1 * self.scale_N
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def to_int8(layers: list[Layer]) -> None:
    """Products of all layers but routers and mixtures of experts, which keep their format."""
    for layer in layers:
        layer.qkv, layer.out = _rounded(layer.qkv), _rounded(layer.out)
        if layer.up is not None and layer.down is not None:
            layer.up, layer.down = _rounded(layer.up), _rounded(layer.down)


def _rounded(product: Product) -> Product:
    assert isinstance(product, Dense), "only plain weights can be rounded"
    return Int8Dense(product.weight, product.bias)
