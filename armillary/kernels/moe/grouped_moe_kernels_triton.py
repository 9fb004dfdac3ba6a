"""Kernels of a mixture of experts for many tokens: `experts_kernel` is both grouped GEMMs, `sum_kernel` adds each
token's experts.

Weights are loaded by TMA, or by plain pointers from compute capability 8.0 on. Few rows per expert are the second
operand of the tensor cores (which take 64 rows of the first): the weight is the first, and it is read once. Codes of
packed weights become numbers in registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.moe.packed_stack_triton import packed_tile
from armillary.kernels.pointwise.activation_triton import activated_pairs

# H hidden, F inner size of an expert; N rows of a weight and K summed elements of a GEMM, T tiles


@triton.jit(do_not_specialize=["T"])
def experts_kernel(
    a_src,
    weight_src,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    order_ptr,
    tiles_ptr,
    ends_ptr,
    out_ptr,
    T,
    N,
    K,
    GATHER: tl.constexpr,
    UP: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of an expert's rows times COLUMNS rows of its weight. Up: rows are gathered from tokens (each has GATHER
    choices), and gate and up alternate. Down: rows are sorted already, and go to the place of their choice."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    across = tl.cdiv(N, COLUMNS)
    begin = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(T - begin, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = begin + within % height, within // height * COLUMNS
    expert = tl.load(tiles_ptr + 2 * tile)
    if expert >= 0:
        first = tl.load(tiles_ptr + 2 * tile + 1)
        row = first + tl.arange(0, ROWS)
        end = tl.load(ends_ptr + expert)
        choice = tl.load(order_ptr + row, mask=row < end, other=0)
        n = column + tl.arange(0, COLUMNS)
        LOADS_ROWS: tl.constexpr = TMA and GATHER == 0
        if LOADS_ROWS:  # the next expert's rows may be among them: they are not stored
            a_row = a_src
        else:
            source = choice // GATHER if GATHER > 0 else tl.minimum(row, end - 1)
            a_row = a_src + source.to(tl.int64)[:, None] * K
        acc = _product(
            a_row,
            weight_src,
            scale_ptr,
            zero_ptr,
            expert,
            first,
            n,
            column,
            N,
            K,
            EXACT,
            TMA,
            LOADS_ROWS,
            EVEN,
            KIND,
            ZEROS,
            SCALE_GROUP,
            ROWS,
            COLUMNS,
            STEP,
            SWAPPED,
        )
        weight = tl.load(weights_ptr + choice, mask=row < end, other=0.0)[:, None]
        if UP and SCALE_INPUT:
            acc = acc * weight
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            acc += bias if UP or SCALE_INPUT else bias * weight
        if UP:
            inner = activated_pairs(tl.reshape(acc, [ROWS, COLUMNS // 2, 2]), CLAMPED)
            if not SCALE_INPUT:
                inner = inner * weight
            at = column // 2 + tl.arange(0, COLUMNS // 2)
            out = out_ptr + row.to(tl.int64)[:, None] * (N // 2) + at[None, :]
            tl.store(out, inner.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (at < N // 2)[None, :])
        else:
            out = out_ptr + choice.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (n < N)[None, :])


@triton.jit
def _product(
    a_row,
    weight_src,
    scale_ptr,
    zero_ptr,
    expert,
    first,
    n,
    column,
    N,
    K,
    EXACT: tl.constexpr,
    TMA: tl.constexpr,
    LOADS_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """[ROWS, COLUMNS] in fp32."""
    if not TMA:
        w_at = (expert.to(tl.int64) * N + tl.minimum(n, N - 1))[:, None]
    acc = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for begin in tl.range(0, K, STEP):
        k = (begin + tl.arange(0, STEP))[None, :]
        a = a_row.load([first, begin]) if LOADS_ROWS else _step(a_row, k, K, EVEN)
        if KIND != "":
            numbers = packed_tile(
                weight_src, scale_ptr, zero_ptr, w_at, begin, K, SCALE_GROUP, KIND, ZEROS, COLUMNS, STEP
            )
            w = numbers.to(a.dtype)
        elif TMA:
            w = weight_src.load([expert * N + column, begin])
        else:
            w = _step(weight_src + w_at * K, k, K, EVEN)
        if SWAPPED:
            acc = tl.dot(w, tl.trans(a), acc, input_precision=EXACT)
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision=EXACT)
    return tl.trans(acc) if SWAPPED else acc


@triton.jit
def _step(rows, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(rows + k)
    else:
        return tl.load(rows + k, mask=k < K, other=0.0)


@triton.jit
def sum_kernel(
    out_ptr,
    residual_ptr,
    sum_ptr,
    H,
    EARLY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a token's outputs."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(out_ptr + (token * TOP_K + slot) * H + h, mask=h < H, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(sum_ptr + token * H + h, total.to(sum_ptr.dtype.element_ty), mask=h < H)
