"""Table lookups of a decode step, and the write of its sampled tokens: one launch each.

The inputs of a step are one packed array, in which each part has its offset. By torch they take one kernel per table,
together longer than a layer of a small model.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import on, power_of_two

# B sequences with one new token each, G groups of layers, P blocks of a table, R rows, A angles, F and I float and int
# sampling parameters


@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """What a decode step needs of its rows."""

    wide: Tensor  # the step's packed inputs in int64
    tokens_B: Tensor
    tables_GBP: Tensor
    cos_BA: Tensor
    sin_BA: Tensor
    floats_FB: Tensor
    ints_IB: Tensor
    top_k_B: Tensor  # the second of these, in int32


def look_up(
    packed: Tensor,
    places: dict[str, int],
    rows: int,
    tokens_RT: Tensor,
    tables_GRP: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    floats_FR: Tensor,
    ints_IR: Tensor,
) -> DecodeInputs:
    """For `rows` sequences, each with one new token. `places`: offsets of rows_T, positions_T, angles_T and rows_B;
    `cos_sin`: cos and sin of all positions."""
    cos, sin = cos_sin
    new = partial(torch.empty, device=packed.device)
    groups, num_rows, pages = tables_GRP.shape
    begins = (places[name] for name in ("rows_T", "positions_T", "angles_T", "rows_B"))
    inputs = DecodeInputs(
        wide=new(len(packed), dtype=torch.int64),
        tokens_B=new(rows, dtype=torch.int64),
        tables_GBP=new(groups, rows, pages, dtype=torch.int32),
        cos_BA=new(rows, cos.shape[1], dtype=cos.dtype),
        sin_BA=new(rows, cos.shape[1], dtype=sin.dtype),
        floats_FB=new(len(floats_FR), rows, dtype=floats_FR.dtype),
        ints_IB=new(len(ints_IR), rows, dtype=torch.int64),
        top_k_B=new(rows, dtype=torch.int32),
    )
    with on(packed):
        _look_up_kernel[(rows,)](
            packed,
            tokens_RT,
            tables_GRP,
            cos,
            sin,
            floats_FR,
            ints_IR,
            inputs.wide,
            inputs.tokens_B,
            inputs.tables_GBP,
            inputs.cos_BA,
            inputs.sin_BA,
            inputs.floats_FB,
            inputs.ints_IB,
            inputs.top_k_B,
            len(packed),
            rows,
            num_rows,
            tokens_RT.stride(0),
            *begins,
            groups,
            pages,
            cos.shape[1],
            FLOATS=len(floats_FR),
            INTS=len(ints_IR),
            HALF_DIM=power_of_two(cos.shape[1]),
            BLOCK=256,
            num_warps=4,
        )
    return inputs


def put(tokens_B: Tensor, wide: Tensor, rows_at: int, positions_at: int, tokens_RT: Tensor) -> None:
    """Write tokens into their rows, given by the step's inputs from `rows_at` and `positions_at` on; negative tokens
    become zero."""
    with on(tokens_B):
        _put[(len(tokens_B),)](tokens_B, wide, tokens_RT, rows_at, positions_at, tokens_RT.stride(0), num_warps=1)


@triton.jit(do_not_specialize=["size", "rows", "num_rows", "longest", "rows_T", "positions_T", "angles_T", "rows_B"])
def _look_up_kernel(
    packed,
    tokens,
    tables,
    cos,
    sin,
    floats,
    ints,
    wide,
    token_out,
    table_out,
    cos_out,
    sin_out,
    float_out,
    int_out,
    top_k_out,
    size,
    rows,
    num_rows,
    longest,
    rows_T,
    positions_T,
    angles_T,
    rows_B,
    groups,
    pages,
    half_dim,
    FLOATS: tl.constexpr,
    INTS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence)."""
    b, each = tl.program_id(0), tl.arange(0, BLOCK)
    row, place = tl.load(packed + rows_T + b).to(tl.int64), tl.load(packed + positions_T + b)
    angle, own = tl.load(packed + angles_T + b).to(tl.int64), tl.load(packed + rows_B + b).to(tl.int64)
    tl.store(token_out + b, tl.load(tokens + row * longest + place).to(tl.int64))
    dim = tl.arange(0, HALF_DIM)
    tl.store(
        cos_out + b * half_dim + dim, tl.load(cos + angle * half_dim + dim, mask=dim < half_dim), mask=dim < half_dim
    )
    tl.store(
        sin_out + b * half_dim + dim, tl.load(sin + angle * half_dim + dim, mask=dim < half_dim), mask=dim < half_dim
    )
    for part in tl.static_range(FLOATS):
        tl.store(float_out + part * rows + b, tl.load(floats + part * num_rows + own))
    for part in tl.static_range(INTS):
        tl.store(int_out + part * rows + b, tl.load(ints + part * num_rows + own))
    tl.store(top_k_out + b, tl.load(ints + num_rows + own).to(tl.int32))
    for group in range(groups):
        source = tables + (group * num_rows + own) * pages
        target = table_out + (tl.cast(group, tl.int64) * rows + b) * pages
        for begin in range(0, pages, BLOCK):
            at = begin + each
            tl.store(target + at, tl.load(source + at, mask=at < pages), mask=at < pages)
    for begin in range(b * BLOCK, size, rows * BLOCK):
        at = begin + each
        tl.store(wide + at, tl.load(packed + at, mask=at < size, other=0).to(tl.int64), mask=at < size)


@triton.jit(do_not_specialize=["rows_at", "positions_at", "longest"])
def _put(tokens, wide, out, rows_at, positions_at, longest):
    """Program (sequence)."""
    b = tl.program_id(0)
    row, place = tl.load(wide + rows_at + b), tl.load(wide + positions_at + b)
    tl.store(out + row * longest + place, tl.maximum(tl.load(tokens + b), 0).to(tl.int32))
