"""Launch shapes of the norm kernels, by the number of columns: measured on an H200, stated as rules.

A row is held in pieces of WIDTH columns, a power of two, of which each thread reads 16 bytes. Threads that hold more of
a row synchronise less; more threads hide more latency.
"""

from typing import NamedTuple

from armillary.kernels.core.launch import ceil_div, power_of_two

_WARP_BYTES = 512  # bytes that a warp reads at once, 16 per thread
_MOST_IDLE = 1.2  # lanes per column, at most, where a mostly empty piece costs as much as a full one


class LaunchShape(NamedTuple):
    """Launch options of a norm kernel."""

    rows: int  # rows that a program holds at a time
    width: int  # columns of a piece
    warps: int
    programs: int = 0  # per multiprocessor; 0: one for every block of rows
    stages: int = 1  # blocks of rows in flight
    ahead: bool = False  # whether the weight is read once, before the rows


def forward_shape(columns: int, element_size: int, alternative: bool, *, centred: bool, residual: bool) -> LaunchShape:
    """Eight warps per row. A layer norm has two sums to wait for, and two vectors to read with each row: two rows share
    both where pieces are full, or four warps wait less. `alternative` is the second best."""
    if columns <= 2048:
        width = power_of_two(columns)
        return LaunchShape(max(1, 2048 // width), width, 4)
    rows, warps = 1, 16 if columns > (12288 if not residual else 8192) else 8
    if centred and columns < 8192 and not residual:
        rows, warps = (2, 8) if columns % 4096 == 0 else (1, 4)
        if alternative:
            rows, warps = 3 - rows, 4
    elif alternative:
        rows, warps = (2, 16) if 7168 < columns <= 8192 else (1, warps // 2)
    return LaunchShape(rows, warps * _WARP_BYTES // element_size, warps)


def reads_twice(columns: int, element_size: int, alternative: bool) -> bool:
    """Whether the forward pass of an RMS norm without a residual is faster when it holds nothing and reads rows a
    second time, from a cache: measured for 8,192 columns of a 16-bit dtype (97 against 93 % of copy bandwidth)."""
    return not alternative and (columns, element_size) == (8192, 2)


def backward_shape(columns: int, element_size: int, alternative: bool, *, sums: int) -> LaunchShape:
    """One program per multiprocessor, so that few sums are left to add up; the next rows are loaded meanwhile, as many
    as 100 kB hold. Without sums, one program per row. `alternative` is the second best."""
    if not sums and columns > 2048:
        warps = fitting_warps(columns, element_size, (8 if columns <= 12288 else 16) // (2 if alternative else 1))
        return LaunchShape(1, warps * _WARP_BYTES // element_size, warps)
    if columns <= 512:
        width = power_of_two(columns)
        return LaunchShape(8192 // width, width, 16, 1, 3)
    if columns <= 2048:
        return LaunchShape(2, 1024, 8, 1, 4)
    most = 8 if columns <= 7168 else 16 if columns <= 12288 or sums == 2 else 32
    if alternative:
        most = 4 if columns <= 6144 else 8 if columns <= 8192 else 16
    warps = fitting_warps(columns, element_size, most)
    width = warps * _WARP_BYTES // element_size
    if columns > 12288:
        return LaunchShape(1, width, warps, 1, 3 if alternative else 1)
    if warps == 4:
        return LaunchShape(1, width, 4, 3, 1) if alternative else LaunchShape(1, width, 4, 2, 3)
    stages = 5 if columns <= 4096 else 4 if columns <= 7168 else 3
    return LaunchShape(1, width, warps, 1, stages, ahead=columns <= 8192 and (sums == 2 or warps == 16))


def fitting_warps(columns: int, element_size: int, warps: int) -> int:
    """That many warps, or half or a quarter of them where pieces would be mostly empty."""
    for fewer in (warps, warps // 2, warps // 4):
        width = fewer * _WARP_BYTES // element_size
        if ceil_div(columns, width) * width <= _MOST_IDLE * columns:
            return max(4, fewer)
    return max(4, warps // 4)
