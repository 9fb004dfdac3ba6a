"""A plain fp32 weight on a CPU for a few tokens: `few_rows.cpp` reads it once for all of them. From four tokens on
torch's GEMM takes two to three times as long as for one (MKL, one core of a Xeon at 2.5 GHz, 2026-11-19), which would
cost draft tokens what they save."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.native.library import library

# N outputs, K inputs, M tokens

_LANES = 16
_MOST_TOKENS = 15


class FewRows:
    """Call it with x [M, K] for x @ weightᵀ + bias; many tokens are torch's."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None, kernels: Any) -> None:
        self.weight, self.bias, self._kernels = weight_NK, bias, kernels

    @classmethod
    def of(cls, weight_NK: Tensor, bias: Tensor | None = None) -> "FewRows | None":
        """None where no kernel takes it."""
        kernels = library()
        plain = weight_NK.dtype == torch.float32 and weight_NK.is_contiguous() and not weight_NK.shape[1] % _LANES
        if kernels is None or not plain or (bias is not None and bias.dtype != torch.float32):
            return None
        return cls(weight_NK.detach(), None if bias is None else bias.detach().contiguous(), kernels)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or not 0 < len(x) <= _MOST_TOKENS or x.dtype != torch.float32:
            return F.linear(x, self.weight, self.bias)
        x, (rows, columns) = x.contiguous(), self.weight.shape
        y = x.new_empty(len(x), rows)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        sizes = len(x), rows, columns
        threads = torch.get_num_threads()
        self._kernels.armillary_few_rows(self.weight.data_ptr(), x.data_ptr(), *sizes, bias_at, y.data_ptr(), threads)
        return y
