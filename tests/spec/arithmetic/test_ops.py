"""Counts of single operations, held against torch's own FLOP counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from armillary.spec.arithmetic import ops


def counted(step: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as mode:
        step()
    return int(mode.get_total_flops())


def test_matmul_is_two_flops_a_multiply_add_and_reads_each_operand_once() -> None:
    op = ops.matmul("qkv", 4, 6, 5, dtype="bf16")
    assert (op.flops, op.bytes_read, op.bytes_written) == (240, 2 * (20 + 30), 2 * 24)
    assert op.bytes == 148 and op.intensity == 240 / 148 and op.on_matrix_units


def test_matmul_reads_quantised_weights_at_their_own_size() -> None:
    op = ops.matmul("down", 1, 4096, 4096, dtype="bf16", weight_dtype="int4")
    assert op.bytes_read == 4096 * 2 + 4096 * 4096 / 2
    assert ops.matmul("head", 2, 3, 4, dtype="bf16", out_dtype="fp32").bytes_written == 24


def test_matmul_agrees_with_torch_forward_and_backward() -> None:
    import torch

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    op = ops.matmul("linear", 4, 6, 5, dtype="fp32")
    assert counted(lambda: x @ w) == op.flops
    assert counted(lambda: (x @ w).sum().backward()) == op.flops + ops.total(ops.matmul_backward(op))[0]


def test_batched_matmul_agrees_with_torch() -> None:
    import torch

    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert counted(lambda: a @ b) == ops.batched_matmul("bmm", 3, 4, 6, 5, dtype="fp32").flops


def test_grouped_matmul_reads_only_the_weights_that_get_a_row() -> None:
    op = ops.grouped_matmul("experts", 3, 8, 4, groups=16, dtype="bf16")
    assert op.flops == 2 * 3 * 8 * 4
    assert op.bytes_read == 2 * (3 * 4 + 3 * 4 * 8)
    full = ops.grouped_matmul("experts", 1000, 8, 4, groups=16, dtype="bf16")
    assert full.bytes_read == 2 * (1000 * 4 + 16 * 4 * 8) and full.shape == (16, 63, 8, 4)
    assert ops.grouped_matmul("experts", 0, 8, 4, groups=16, dtype="bf16").flops == 0


def test_grouped_backward_writes_every_expert_gradient() -> None:
    dx, dw = ops.grouped_matmul_backward("experts", 3, 8, 4, groups=16, dtype="bf16")
    assert dx.flops == dw.flops == 2 * 3 * 8 * 4
    assert dx.bytes_written == 2 * 3 * 4 and dw.bytes_written == 2 * 16 * 4 * 8


CONVS = {
    "1d": ops.Conv(batch=2, channels_in=4, channels_out=6, size=(20,), kernel=(3,)),
    "1d depthwise": ops.Conv(batch=2, channels_in=4, channels_out=4, size=(20,), kernel=(4,), padding=(3,), groups=4),
    "2d": ops.Conv(batch=2, channels_in=3, channels_out=8, size=(12, 10), kernel=(3, 5)),
    "2d strided": ops.Conv(
        batch=1, channels_in=4, channels_out=8, size=(13, 9), kernel=(3, 3), stride=(2,), padding=(1,)
    ),
    "2d grouped dilated": ops.Conv(
        batch=1, channels_in=4, channels_out=8, size=(16, 16), kernel=(3, 3), stride=(1, 2), dilation=(2,), groups=2
    ),
}


@pytest.mark.parametrize("shape", CONVS.values(), ids=CONVS.keys())
def test_convolution_agrees_with_torch(shape: ops.Conv) -> None:
    import torch

    function = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}[len(shape.size)]
    x = torch.randn(shape.batch, shape.channels_in, *shape.size, requires_grad=True)
    w = torch.randn(shape.channels_out, shape.channels_in // shape.groups, *shape.kernel, requires_grad=True)

    def forward() -> Any:
        return function(x, w, stride=shape.stride, padding=shape.padding, dilation=shape.dilation, groups=shape.groups)

    op, y = ops.conv("conv", shape, dtype="fp32"), forward()
    assert tuple(y.shape[2:]) == shape.out
    assert (x.numel(), w.numel(), y.numel()) == shape.counts
    assert counted(forward) == op.flops
    back = ops.conv_backward("conv", shape, dtype="fp32")
    if shape.groups == 1:  # torch 2.13 counts the weight gradient of grouped convolutions without dividing by groups
        assert counted(lambda: forward().sum().backward()) == op.flops + ops.total(back)[0]
    assert len(ops.conv_backward("first", shape, dtype="fp32", input_grad=False)) == 1


def test_memory_bound_operations_count_their_arrays() -> None:
    add = ops.elementwise("add", 100, dtype="bf16", inputs=2)
    assert (add.flops, add.bytes_read, add.bytes_written) == (100, 400, 200) and not add.on_matrix_units
    cast = ops.copy("cast", 100, dtype="fp32", out_dtype="bf16")
    assert (cast.flops, cast.bytes) == (0, 600) and cast.intensity == 0
    assert ops.reduction("sum", 100, dtype="fp32").bytes == 404
    assert ops.dropout("drop", 100, dtype="bf16").bytes == 400
    assert ops.dropout("drop", 100, dtype="bf16", mask=True).bytes == 500
    assert ops.softmax("p", 10, 10, dtype="fp32").bytes == 800
    assert ops.softmax("p", 10, 10, dtype="fp32", backward=True).bytes == 1200


def test_an_operation_that_moves_nothing_has_no_intensity() -> None:
    assert ops.matmul("empty", 0, 0, 4, dtype="bf16").intensity == 0
