"""A linear layer that multiplies in fp8, forward and backward, whatever wraps or cuts it.

The weight stays what it was (fp32, or bf16 as FSDP gathers it) under its name; it is rounded where it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from armillary.kernels.fp8.linear import E4M3, reference
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, make_operand

Multiply = Callable[[Tensor, Tensor, str], Tensor]
"""x, weight and scaling -> x·weightᵀ, as `kernels.fp8_linear.reference`"""


class Fp8Linear(nn.Linear):
    """An nn.Linear by another class; made of one by `use_fp8`."""

    multiply: Multiply
    scaling: str

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = self.multiply(x.to(half), self.weight.to(half), self.scaling)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_fp8(model: Any, *, scaling: str, kept: Collection[str] = (), multiply: Multiply = reference) -> list[str]:
    """Projections of attention and of dense MLPs, but for those `kept` and those that are something else already
    (adapters), become Fp8Linear; gives the names of those that did, within a block."""
    made: dict[str, None] = {}
    for block in model.blocks.values():
        parts = {"attention.qkv": block.attention.qkv, "attention.out": block.attention.out}
        parts |= {f"mlp.{name}": getattr(block.mlp, name, None) for name in ("up", "down")}
        for name, module in parts.items():
            if name not in kept and type(module) in (nn.Linear, Fp8Linear):
                module.__class__ = Fp8Linear
                module.multiply, module.scaling = multiply, scaling
                made[name] = None
    return list(made)


class Fp8Weights:
    """Operands of the parameters that were asked for."""

    def __init__(self, scaling: str) -> None:
        """A weight has no tokens: with a scale a token, it has one a row, both ways."""
        self.scaling = "row" if scaling == "token" else scaling
        self.kept: dict[Tensor, tuple[int, Operand]] = {}

    def rows(self, parameter: nn.Parameter) -> ScaledTensor:
        """[N, K], for the forward product."""
        found = self._of(parameter, transposed=False).rows
        assert found is not None
        return found

    def transposed(self, parameter: nn.Parameter) -> ScaledTensor:
        """[K, N], for the product back to the input."""
        found = self._of(parameter, transposed=True).transposed
        assert found is not None
        return found

    def _of(self, parameter: nn.Parameter, *, transposed: bool) -> Operand:
        source = Source(x=parameter.detach())
        if parameter.dtype != torch.float32:
            return make_operand(source, E4M3, self.scaling, rows=not transposed, transposed=transposed)
        version, operand = self.kept.get(parameter, (-1, None))
        if operand is None or version != parameter._version:
            self.kept.pop(parameter, None)  # let go before the new one is made
            operand = make_operand(source, E4M3, self.scaling)
            self.kept[parameter] = parameter._version, operand
        return operand

    @property
    def nbytes(self) -> int:
        """What is kept."""
        pairs = (pair for _, operand in self.kept.values() for pair in (operand.rows, operand.transposed))
        return sum(pair.values.nbytes + pair.scale.nbytes for pair in pairs if pair is not None)
