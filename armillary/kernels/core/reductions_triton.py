"""Sums over rows: the second pass of a gradient whose programs each summed their own rows, and in-place addition.

The order is fixed, so the result is deterministic. Two gradients are summed by one launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, on, power_of_two

_COLUMNS, _MOST_ROWS = 32, 256


def column_sums(parts_GPN: Tensor, *outs: Tensor) -> None:
    """Sum each of one or two groups of `parts_GPN` over its rows in fp32, and write it to its `out` in its dtype."""
    groups, rows, columns = parts_GPN.shape
    assert groups == len(outs) <= 2
    early = can_start_early(parts_GPN.device)
    with on(parts_GPN):
        _kernel[(ceil_div(columns, _COLUMNS), groups)](
            parts_GPN,
            outs[0],
            outs[-1],
            rows,
            columns,
            ROWS=min(_MOST_ROWS, power_of_two(rows)),
            BLOCK=_COLUMNS,
            EARLY=early,
            num_warps=8,
            **early_launch(early),
        )


@triton.jit
def _kernel(
    parts_ptr, first_ptr, second_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:  # launched while the previous kernel still runs; wait for its sums
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        total += tl.load(parts_ptr + (group * rows + row).to(tl.int64) * columns + column, mask=inside, other=0.0)
    out = tl.sum(total, axis=0, keep_dims=True)
    if group == 0:
        tl.store(first_ptr + column, out.to(first_ptr.dtype.element_ty), mask=column < columns)
    else:
        tl.store(second_ptr + column, out.to(second_ptr.dtype.element_ty), mask=column < columns)


_BLOCK, _WARPS = 4096, 8


def add_(total: Tensor, part: Tensor) -> None:
    """total += part; both contiguous and of one shape."""
    assert total.shape == part.shape and total.is_contiguous() and part.is_contiguous(), (
        "contiguous tensors of one shape"
    )
    count = total.numel()
    if count:
        with on(total):
            add_kernel[(ceil_div(count, _BLOCK),)](total, part, count, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def add_kernel(total_ptr, part_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    part = tl.load(part_ptr + at, mask=inside, other=0.0).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, tl.load(total_ptr + at, mask=inside, other=0.0) + part, mask=inside)
