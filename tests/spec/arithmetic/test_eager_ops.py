"""Bytes and calls that the planner counts for plain layers, against those that torch's operators really make."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.spec import catalogue
from armillary.spec.arithmetic.eager_ops import eager_bytes
from armillary.spec.arithmetic.workload import embedding_operations, layer_operations, make_batch
from armillary.spec.model import ModelConfig
from tests.emulated_bf16 import any_cpu

ROWS, LENGTH = 4, 64
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
FREE = {
    "view",
    "t",
    "transpose",
    "detach",
    "alias",
    "slice",
    "select",
    "unbind",
    "expand",
    "split",
    "_unsafe_view",
    "unsqueeze",
    "permute",
    "as_strided",
    "squeeze",
    "promote_types",
    "lift_fresh",
}
"""calls that move nothing"""


class Counted(TorchDispatchMode):
    """Bytes and calls of every operator but products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        if name not in FREE and not name.startswith(PRODUCTS):
            self.bytes += _size(args) + _size(made)
            self.calls += 1
        return made


def _size(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0.0


def counted(config: ModelConfig, dtype: str) -> tuple[Counted, Counted]:
    """(forward, backward) of the layers and the embedding."""
    model = build(config, dtype=torch.float32, device="cpu", seed=0).train()
    tokens, positions = torch.randint(0, config.vocab, (ROWS, LENGTH)), torch.arange(LENGTH).expand(ROWS, LENGTH)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()
    with narrow, Counted() as forward:
        hidden = model(tokens, positions, plain)
    with Counted() as backward:
        hidden.backward(torch.ones_like(hidden))
    return forward, backward


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "gated": False, "activation": "gelu"}, {"qk_norm": "head"}])
def test_bytes_and_calls_of_layers(dtype: str, changes: dict[str, Any]) -> None:
    config = replace(catalogue.model("armillary-2m").config.with_layers(3), vocab=512, final_norm=False, **changes)
    batch = make_batch([LENGTH] * ROWS, dtype=dtype)
    pieces = [piece for kind in config.layers for piece in layer_operations(config, kind, batch)]
    found = [eager_bytes(config, piece.forward) for piece in (*pieces, *embedding_operations(config, batch))]
    with any_cpu():
        forward, backward = counted(config, dtype)
    assert sum(one.forward for one in found) == pytest.approx(forward.bytes, rel=0.06)
    assert sum(one.backward for one in found) == pytest.approx(backward.bytes, rel=0.06)
    assert sum(one.calls_forward for one in found) == pytest.approx(forward.calls, rel=0.12)
    assert sum(one.calls_backward for one in found) == pytest.approx(backward.calls, rel=0.12)
