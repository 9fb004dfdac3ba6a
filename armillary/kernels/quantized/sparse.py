"""A linear layer whose weight has two zeros in every four inputs (2:4), in the compressed form of the tensor cores.

The library's kernels, through torch's semi-structured tensors: cuSPARSELt where torch was built with it, or CUTLASS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import to_sparse_semi_structured

from armillary.kernels.core.launch import power_of_two
from armillary.kernels.core.requirements import lacking

_TOKENS = 16  # their number is a multiple of this
_MULTIPLE = 64  # of outputs and inputs that every kernel of both libraries takes


def prune(weight_NK: Tensor) -> Tensor:
    """The two largest of every four inputs, the others zero."""
    fours = weight_NK.unflatten(1, (-1, 4))
    largest = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, fours.abs().topk(2, dim=-1).indices, True)
    return torch.where(largest, fours, 0).flatten(1)


def is_pruned(weight_NK: Tensor) -> bool:
    """Whether at most two of every four inputs are not zero, in every row."""
    return weight_NK.shape[1] % 4 == 0 and bool((weight_NK.unflatten(1, (-1, 4)) != 0).sum(-1).le(2).all())


def refuses(weight_NK: Tensor) -> str | None:
    """Why the library multiplies no weight of this dtype and shape."""
    if weight_NK.dtype not in (torch.bfloat16, torch.float16):
        return f"has no kernels for {weight_NK.dtype}; they are for 16 bits"
    if any(size % _MULTIPLE for size in weight_NK.shape):
        return f"needs outputs and inputs in multiples of {_MULTIPLE}"
    return lacking(("sm_80",), weight_NK.device.type)


class SparseLinear:
    """x @ weightᵀ + bias of a 2:4 weight on a GPU that multiplies such weights (compute capability 8.0 and more). Which
    of the library's kernels is fastest depends on the number of tokens: each power of two is tried once."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None) -> None:
        self.by_library = torch.backends.cusparselt.is_available()
        weight = weight_NK.contiguous()
        self.weight = torch._cslt_compress(weight) if self.by_library else to_sparse_semi_structured(weight)
        self.bias = bias
        self.kernels: dict[int, int] = {}  # tokens, rounded up to a power of two -> the library's kernel

    def __call__(self, x: Tensor) -> Tensor:
        if not self.by_library:
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        padded = F.pad(flat, (0, 0, 0, -len(flat) % _TOKENS))
        kernel = self.fastest(padded)
        y = torch._cslt_sparse_mm(self.weight, padded.t(), bias=self.bias, transpose_result=True, alg_id=kernel)
        return y[: len(flat)].view(*x.shape[:-1], y.shape[1])

    def fastest(self, x: Tensor) -> int:
        """The library's kernel for as many tokens; its default while a graph is captured, because trying launches."""
        size = power_of_two(len(x))
        if size not in self.kernels:
            if torch.cuda.is_current_stream_capturing():
                return 0
            self.kernels[size] = _search(self.weight, x.t(), self.bias)
        return self.kernels[size]


def _search(weight: Tensor, x_KM: Tensor, bias: Tensor | None) -> int:
    """The fastest of the library's kernels; its function moved in torch 2.11, where the old one warns."""
    library = getattr(torch._C, "_cusparselt", None)
    if library is not None and hasattr(library, "mm_search"):
        return int(library.mm_search(weight, x_KM, bias, None, None, True)[0])
    return int(torch._cslt_sparse_mm_search(weight, x_KM, bias=bias, transpose_result=True))
