"""bf16 weights on a CPU in the layout of its matrix units (oneDNN), packed once when the engine starts.

torch's own GEMM packs them in every call, which for a few tokens takes longer than the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from armillary.engine.runner.forward import Forward, no_reduce
from armillary.engine.runner.layer import Dense, Product
from armillary.model.layers.mlp import MLP
from armillary.model.transformer import Transformer

Make = Callable[[Tensor, Tensor | None], Product]
"""(weight, bias) -> linear function"""


class PackedDense:
    """x @ weightᵀ + bias. With `plain`, the unpacked weight is kept too: for a single token it is a fifth faster."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None, *, plain: bool = False) -> None:
        self._ops: Any = torch.ops.mkldnn
        self._packed = self._ops._reorder_linear_weight(weight_NK.detach(), None)
        self._plain_NK = weight_NK.detach() if plain else None
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._plain_NK is None or len(x) != 1:
            return self._ops._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        y = torch.mv(self._plain_NK, x[0])
        return (y if self._bias is None else y + self._bias)[None]


def packs(weight: Tensor) -> bool:
    """Whether this CPU and build of torch support packed bf16 weights."""
    ops: Any = torch.ops.mkldnn
    known = torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")
    here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return bool(known and here and ops._is_mkldnn_bf16_supported())


def replace_linears(forward: Forward, make: Make, *, let_go: bool) -> None:
    """Replace the linear functions of all layers but routers and experts; `let_go` frees the model's own weights."""
    for layer, block in zip(forward.layers, forward.model.blocks.values(), strict=True):
        layer.qkv, layer.out = _made(layer.qkv, make), _made(layer.out, make)
        if layer.up is not None and layer.down is not None:
            layer.up, layer.down = _made(layer.up, make), _made(layer.down, make)
        if let_go:
            _let_go(block.attention.qkv, block.attention.out)
            if isinstance(block.mlp, MLP):
                _let_go(block.mlp.up, block.mlp.down)


def replace_head(forward: Forward, make: Make, *, let_go: bool) -> None:
    """The same for the head, unless it is sharded over ranks."""
    if forward.reduce is no_reduce:
        forward.head = _head(forward.model, make)
        if let_go and forward.model.output is not None:
            _let_go(forward.model.output)


def _made(product: Product, make: Make) -> Product:
    assert isinstance(product, Dense), "only plain weights can be packed or quantized"
    return make(product.weight, product.bias)


def _head(model: Transformer, make: Make) -> Product:
    """`Transformer.head` with another linear function."""
    if model.output is not None:
        product = make(model.output.weight, model.output.bias)
    else:
        assert model.embedding is not None, "an engine has the whole model"
        product = make(model.embedding.weight, None)
    scale, cap = model.config.logit_scale, model.config.logit_softcap

    def logits(x: Tensor) -> Tensor:
        logits_BV = product(x) if scale == 1.0 else product(x) * scale
        return logits_BV if cap is None else cap * torch.tanh(logits_BV / cap)

    return logits


def _let_go(*linears: nn.Linear) -> None:
    for linear in linears:
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
