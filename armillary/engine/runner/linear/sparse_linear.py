"""Weights of which two in every four inputs are zero (`armillary quantize --to 2:4`), compressed when the engine starts
and multiplied by the sparse tensor cores of a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.engine.runner.forward import Forward
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn
from armillary.engine.runner.linear.linear_formats import replace_linears
from armillary.errors import BadInput
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.core.requirements import note_once
from armillary.kernels.quantized.sparse import SparseLinear, is_pruned, refuses

_TOLERANCE = 2e-2  # of sums of 16-bit products in another order
_CHECKED_TOKENS = 16


def to_sparse(forward: Forward, *, let_go: bool) -> None:
    """Every layer that is 2:4, but for routers and experts; `let_go` frees the model's own weights."""
    _check(forward.model.blocks["0"].attention.out.weight)
    forward.kernels = replace(forward.kernels, small=None)  # it takes plain weights
    replace_linears(forward, sparse_linear, let_go=let_go)


def _check(weight_NK: Tensor) -> None:
    """BadInput where this weight, the model's first, cannot run so."""
    if why := refuses(weight_NK):
        raise BadInput(f"serve.weights=2:4 {why}; leave serve.weights=auto")
    if not is_pruned(weight_NK):
        raise BadInput(
            "more than two weights of every four inputs are not zero; prune them with armillary quantize --to 2:4, or "
            "leave serve.weights=auto"
        )


def sparse_linear(weight_NK: Tensor, bias: Tensor | None = None) -> LinearFn:
    """Compressed; dense where it is not 2:4 (--keep), or no kernel takes it, or it does not agree with a plain GEMM."""
    dense = Dense(weight_NK, bias)
    if refuses(weight_NK) or not is_pruned(weight_NK):
        return dense
    sparse = SparseLinear(weight_NK.detach(), bias)
    x = torch.randn(_CHECKED_TOKENS, weight_NK.shape[1], device=weight_NK.device, dtype=weight_NK.dtype)
    if relative_error(sparse(x), F.linear(x, weight_NK, bias).float()) > _TOLERANCE:
        note_once(f"2:4 weights {tuple(weight_NK.shape)}: the library does not agree with a plain GEMM; they run dense")
        return dense
    return sparse
