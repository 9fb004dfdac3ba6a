"""The three GEMMs of a linear layer in fp8, operands quantised in Triton: as custom ops, forward and backward.

`fp8_linear` uses our own GEMM kernel; `library_linear` `torch._scaled_mm`, which takes sizes that are multiples of 16
and returns bf16.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.launch import on
from armillary.kernels.fp8.linear import E4M3, E5M2, check_scaling, weight_scaling
from armillary.kernels.fp8.matmul_triton import multiply
from armillary.kernels.fp8.operands import ScaledTensor, Source, make_operand
from armillary.kernels.fp8.quantize_triton import amax_of, quantise, quantise_columns

# M tokens, K inputs, N outputs


def fp8_linear(x_MK: Tensor, weight_NK: Tensor, scaling: str = "row", *, library: bool = False) -> Tensor:
    """x @ weightᵀ in fp8, with fp8 gradients; by our own GEMMs or the library's."""
    check_scaling(scaling)
    return _linear(x_MK.flatten(0, -2), weight_NK, scaling, library).unflatten(0, x_MK.shape[:-1])


library_linear = partial(fp8_linear, library=True)


@torch.library.custom_op(
    "armillary::fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, str scaling, bool library) -> Tensor",
)
def _linear(x: Tensor, weight: Tensor, scaling: str, library: bool) -> Tensor:
    with on(x):
        if scaling == "token":
            a: Any = make_operand(_padded_source(x), E4M3, "token", transposed=False).rows
        else:
            a = quantise(x, E4M3, scaling)
        return multiply(a, quantise(weight, E4M3, weight_scaling(scaling)), x.dtype, fast=True, library=library)


def _padded_source(x: Tensor) -> Source:
    """Padded with zero columns to a multiple of 16."""
    missing = -x.shape[1] % 16
    return Source(x=F.pad(x, (0, missing)) if missing else x)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, scaling: str, library: bool) -> Tensor:
    return x.new_empty(len(x), len(weight))


@torch.library.custom_op(
    "armillary::fp8_linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, str scaling, bool library, bool grad_x, bool grad_w)"
    " -> (Tensor, Tensor)",
)
def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, library: bool, grad_x: bool, grad_w: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    with on(x):
        dy_rows, dy_transposed = _rows_and_transposed(dy, scaling, grad_x, grad_w)
        if grad_x:
            operands = dy_rows, quantise_columns(weight, E4M3, weight_scaling(scaling))
            dx = multiply(*operands, x.dtype, fast=False, library=library)
        if grad_w:
            if scaling == "token":
                x_operand = make_operand(_padded_source(x), E4M3, "token", rows=False)
                x_transposed: Any = _without_padding(x_operand.transposed, x.shape[1])
            else:
                x_transposed = quantise_columns(x, E4M3, scaling)
            dw = multiply(dy_transposed, x_transposed, weight.dtype, fast=False, library=library)
    return dx, dw


def _without_padding(transposed: ScaledTensor | None, rows: int) -> ScaledTensor | None:
    """Without the rows that padding added."""
    return None if transposed is None else ScaledTensor(transposed.values[:rows], transposed.scale)


def _rows_and_transposed(dy: Tensor, scaling: str, rows: bool, transposed: bool) -> tuple[Any, Any]:
    """The gradient as it is and transposed, in one pass where its columns need no padding."""
    if scaling == "token":
        operand = make_operand(_padded_source(dy), E5M2, "token", rows=rows, transposed=transposed)
        return operand.rows, _without_padding(operand.transposed, dy.shape[1])
    if dy.shape[1] % 16 == 0:
        operand = make_operand(Source(x=dy), E5M2, scaling, rows=rows, transposed=transposed)
        return operand.rows, operand.transposed
    amax = amax_of(dy, by_column=False) if scaling == "tensor" else None
    return (
        quantise(dy, E5M2, scaling, amax) if rows else None,
        quantise_columns(dy, E5M2, scaling, amax) if transposed else None,
    )


@_gradients.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, library: bool, grad_x: bool, grad_w: bool
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(x.shape if grad_x else (0,)), dy.new_empty(weight.shape if grad_w else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.scaling, ctx.library = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    dx, dw = _gradients(dy, x, weight, ctx.scaling, ctx.library, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None, None


_linear.register_autograd(_backward, setup_context=_setup_context)
