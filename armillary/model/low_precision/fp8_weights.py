"""Weights as operands of fp8 products: made once a step from the fp32 weights, not once a micro-batch.

A weight in a half format is one that FSDP has just gathered, or one that never changes: its operands are made when they
are asked for and not kept, so that sharding still saves what it should.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armillary.kernels.fp8.linear import E4M3
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, make_operand


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
