"""The GEMM with an fp8 weight as a custom op: a norm or SwiGLU that writes fp8 rows, then the GEMM.

`fp8_matmul` uses our own GEMM kernel, `library_matmul` `torch._scaled_mm`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.launch import is_bare, on
from armillary.kernels.fp8.gemm_triton import multiply
from armillary.kernels.fp8.linear import E4M3
from armillary.kernels.fp8.matmul import produced
from armillary.kernels.fp8.quantize_triton import quantise, quantise_rows

# M tokens, K inputs of the GEMM, N outputs


def fp8_matmul(
    x: Tensor, weight_NK: Tensor, scale: Tensor, norm_K: Tensor | None = None, gated: bool = False, eps: float = 1e-6
) -> Tensor:
    """`armillary.kernels.fp8.matmul.reference` with our own GEMM."""
    return (_launched if is_bare(x) else _matmul)(x, weight_NK, scale, norm_K, gated, eps, False)


def library_matmul(
    x: Tensor, weight_NK: Tensor, scale: Tensor, norm_K: Tensor | None = None, gated: bool = False, eps: float = 1e-6
) -> Tensor:
    """`armillary.kernels.fp8.matmul.reference` with the library's GEMM."""
    return (_launched if is_bare(x) else _matmul)(x, weight_NK, scale, norm_K, gated, eps, True)


def _launched(
    x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, gated: bool, eps: float, library: bool
) -> Tensor:
    rows = x.flatten(0, -2)
    with on(x):
        if scale.dim():
            a = quantise_rows(rows, E4M3, norm, gated, eps)
        else:  # a per-tensor scale is known only after the whole tensor: nothing to fuse
            a = quantise(produced(rows, norm, gated, eps), E4M3, "tensor")
        b = _padded(weight, a[0].shape[1]), scale
        return multiply(a, b, x.dtype, fast=True, library=library).unflatten(0, x.shape[:-1])


def _padded(weight: Tensor, columns: int) -> Tensor:
    """Padded with zeros to the columns of the activations, which are a multiple of 16."""
    missing = columns - weight.shape[1]
    return F.pad(weight.view(torch.uint8), (0, missing)).view(weight.dtype) if missing else weight


_matmul = torch.library.custom_op("armillary::fp8_matmul", _launched, mutates_args=())


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, gated: bool, eps: float, library: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
