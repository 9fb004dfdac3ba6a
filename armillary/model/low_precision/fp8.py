"""fp8 training: the linear layer that multiplies in fp8, the fp8 operands of weights, and the GEMMs of fused blocks.

A weight keeps its dtype (fp32, or bf16 as FSDP gathers it) and its name; it is rounded where it is multiplied.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from armillary.kernels.fp8.gemm import Fp8Gemm
from armillary.kernels.fp8.linear import E4M3, reference
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, make_operand

Multiply = Callable[[Tensor, Tensor, str], Tensor]
"""x, weight and scaling -> x·weightᵀ, as `kernels.fp8.linear.reference`"""


class Fp8Linear(nn.Linear):
    """An nn.Linear whose GEMMs run in fp8; `use_fp8` converts layers to it."""

    multiply: Multiply
    scaling: str

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = self.multiply(x.to(dtype), self.weight.to(dtype), self.scaling)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_fp8(model: Any, *, scaling: str, exclude: Collection[str] = (), multiply: Multiply = reference) -> list[str]:
    """Convert projections of attention and of dense MLPs to Fp8Linear, except those in `exclude` and those of another
    class (adapters); returns the names of converted layers within a block."""
    names: dict[str, None] = {}
    for block in model.blocks.values():
        parts: dict[str, Any] = {
            f"attention.{name}": getattr(block.attention, name, None) for name in ("qkv", "q", "kv_up", "out")
        }
        parts |= {f"mlp.{name}": getattr(block.mlp, name, None) for name in ("up", "down")}
        for name, module in parts.items():
            if name not in exclude and type(module) in (nn.Linear, Fp8Linear):
                module.__class__ = Fp8Linear
                module.multiply, module.scaling = multiply, scaling
                names[name] = None
    return list(names)


class Fp8Weights:
    """Weights as operands of fp8 GEMMs, quantised once per step from the fp32 weights, not once per micro-batch.

    The operands of a 16-bit weight (one that FSDP has just gathered, or that never changes) are quantised on demand and
    not kept, so that sharding still saves memory.
    """

    def __init__(self, scaling: str) -> None:
        """A weight has no tokens: with per-token scaling it has per-row scales in both layouts."""
        self.scaling = "row" if scaling == "token" else scaling
        self.operands: dict[Tensor, tuple[int, Operand]] = {}

    def rows(self, parameter: nn.Parameter) -> ScaledTensor:
        """[N, K], for the forward GEMM."""
        return present(self._operand(parameter, transposed=False).rows)

    def transposed(self, parameter: nn.Parameter) -> ScaledTensor:
        """[K, N], for the gradient of the input."""
        return present(self._operand(parameter, transposed=True).transposed)

    def _operand(self, parameter: nn.Parameter, *, transposed: bool) -> Operand:
        source = Source(x=parameter.detach())
        if parameter.dtype != torch.float32:
            return make_operand(source, E4M3, self.scaling, rows=not transposed, transposed=transposed)
        version, operand = self.operands.get(parameter, (-1, None))
        if operand is None or version != parameter._version:
            self.operands.pop(parameter, None)  # freed before the new one is allocated
            operand = make_operand(source, E4M3, self.scaling)
            self.operands[parameter] = parameter._version, operand
        return operand

    @property
    def nbytes(self) -> int:
        scaled = (tensor for _, operand in self.operands.values() for tensor in (operand.rows, operand.transposed))
        return sum(tensor.values.nbytes + tensor.scale.nbytes for tensor in scaled if tensor is not None)


@dataclass(frozen=True, kw_only=True)
class Fp8Gemms:
    """The GEMMs of fused blocks in fp8; one object for all blocks of a model."""

    scaling: str  # 'tensor', 'row' or 'token'
    weights: Fp8Weights
    multiply: Fp8Gemm = field(default_factory=Fp8Gemm)

    def forward(self, x: Operand, parameter: nn.Parameter, template: Tensor, *, add: Tensor | None = None) -> Tensor:
        """x·weightᵀ [B, T, ·] in the dtype of `template`, plus `add`."""
        addend = None if add is None else add.contiguous().flatten(0, -2)
        y = self.multiply(present(x.rows), self.weights.rows(parameter), template.dtype, fast=True, add=addend)
        return y.view(*template.shape[:-1], -1)

    def back(self, dy: Operand, parameter: nn.Parameter, template: Tensor) -> Tensor:
        """dy·weight [B, T, ·]."""
        dx = self.multiply(present(dy.rows), self.weights.transposed(parameter), template.dtype, fast=False)
        return dx.view(*template.shape[:-1], -1)

    def gradient(
        self, parameter: nn.Parameter, dy: Operand, x: ScaledTensor, template: Tensor, *, accumulate: bool
    ) -> Tensor | None:
        """dyᵀ·x, returned, or accumulated into the parameter's .grad."""
        if not parameter.requires_grad:
            return None
        if not accumulate:
            return self.multiply(present(dy.transposed), x, template.dtype, fast=False)
        first = parameter.grad is None
        if first:
            parameter.grad = torch.empty_like(parameter)
        total = parameter.grad
        assert total is not None
        with torch.no_grad():
            self.multiply(present(dy.transposed), x, total.dtype, fast=False, add=None if first else total, out=total)
        return None

    def quantise(self, x: Tensor, dtype: torch.dtype) -> Operand:
        """The operand of a plain tensor."""
        return self.make(Source(x=x.flatten(0, -2)), dtype)

    def make(self, source: Source, dtype: torch.dtype, **options: Any) -> Operand:
        """`make_operand` with this scaling."""
        return make_operand(source, dtype, self.scaling, **options)


def present(scaled: ScaledTensor | None) -> ScaledTensor:
    assert scaled is not None
    return scaled
