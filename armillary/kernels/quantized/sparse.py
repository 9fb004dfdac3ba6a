"""A linear layer whose weight has two zeros in every four inputs (2:4), in the compressed form of the tensor cores.

The library's kernels, through torch's semi-structured tensors: cuSPARSELt where torch was built with it, or CUTLASS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def prune(weight_NK: Tensor) -> Tensor:
    """The two largest of every four inputs, the others zero."""
    fours = weight_NK.unflatten(1, (-1, 4))
    largest = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, fours.abs().topk(2, dim=-1).indices, True)
    return torch.where(largest, fours, 0).flatten(1)


class SparseLinear:
    """x @ weightᵀ + bias of a 2:4 weight on a GPU that multiplies such weights (compute capability 8.0 and more)."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.sparse.to_sparse_semi_structured(weight_NK.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
