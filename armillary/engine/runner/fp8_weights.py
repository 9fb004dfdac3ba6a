"""Weights and activations in fp8 on a GPU: a scale for every row of a weight and for every token, sums in fp32.

Weights are rounded once, when the engine starts; scales of activations are of a token alone, so an answer does not
depend on what stands beside it in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary.engine.runner.forward import Forward
from armillary.engine.runner.layer import Dense, Product
from armillary.errors import BadInput
from armillary.kernels.core.choose import choose
from armillary.kernels.core.requirements import lacking
from armillary.kernels.fp8.linear import E4M3, quantised
from armillary.kernels.fp8.matmul import FP8_MATMUL, Fp8MatmulCase
from armillary.model.layers.mlp import MLP

Matmul = Callable[..., Tensor]
"""`armillary.kernels.fp8.matmul.reference`, or a quicker one"""


class Fp8Dense:
    """x @ weightᵀ + bias with both factors rounded to E4M3."""

    def __init__(self, product: Dense, run: Matmul) -> None:
        weight, scale = quantised(product.weight.detach(), E4M3, "row")
        self.weight_NK, self.scale_N1, self.bias, self._run = weight, scale.float(), product.bias, run

    def __call__(self, x: Tensor) -> Tensor:
        y = self._run(x, self.weight_NK, self.scale_N1)
        return y if self.bias is None else y + self.bias


def pick_fp8(weight: Tensor, tokens: int) -> Matmul:
    """The product for weights like this one; BadInput where the device has none."""
    if lacking(("fp8",), weight.device.type) or weight.dtype != torch.bfloat16:
        raise BadInput(
            "weights in fp8 are for bf16 models on a GPU of compute capability 8.9 or more; leave serve.weights=auto"
        )
    outputs, inputs = weight.shape
    case = Fp8MatmulCase(tokens=tokens, outputs=outputs, inputs=inputs, dtype="bf16", device="cuda")
    run: Any = choose(FP8_MATMUL, case, deterministic=True).run
    return run  # type: ignore[no-any-return]


def to_fp8(forward: Forward, run: Matmul, *, let_go: bool = False) -> None:
    """Products of all layers but routers and mixtures of experts, which keep their format; `let_go` of the wide
    weights, where nobody else needs the model."""
    forward.kernels = replace(forward.kernels, small=None)  # it takes plain weights
    for layer, block in zip(forward.layers, forward.model.blocks.values(), strict=True):
        attention: Any = block.attention
        layer.qkv, layer.out = _rounded(layer.qkv, run), _rounded(layer.out, run)
        linears = [attention.qkv, attention.out]
        if layer.up is not None and layer.down is not None:
            layer.up, layer.down = _rounded(layer.up, run), _rounded(layer.down, run)
            assert isinstance(block.mlp, MLP)
            linears += [block.mlp.up, block.mlp.down]
        for linear in linears if let_go else ():
            linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def _rounded(product: Product, run: Matmul) -> Product:
    assert isinstance(product, Dense), "only plain weights can be rounded"
    return Fp8Dense(product, run)
