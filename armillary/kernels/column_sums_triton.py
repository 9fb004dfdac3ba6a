"""The sum of a few hundred rows: the second half of a gradient that each program summed for its own rows.

The order is fixed, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on

_ROWS, _COLUMNS = 128, 32


def column_sums(parts_PN: Tensor, out_N: Tensor) -> None:
    """Write the fp32 sums of `parts_PN` over its rows into `out_N`, in that one's format."""
    rows, columns = parts_PN.shape
    with on(parts_PN):
        _kernel[(ceil_div(columns, _COLUMNS),)](
            parts_PN, out_N, rows, columns, ROWS=_ROWS, BLOCK=_COLUMNS, num_warps=4
        )


@triton.jit
def _kernel(parts_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        total += tl.load(parts_ptr + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    out = tl.sum(total, axis=0, keep_dims=True)
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < columns)
