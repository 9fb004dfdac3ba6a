"""Paged attention on a GPU: two launches for rows of few queries, one or two more where prefill is in the batch.

Rows of few queries are bound by memory, prefill by arithmetic: where prefill chunks are short, both run at once, in
programs that fit a multiprocessor together. The launches depend on shapes and on `max_query` only, never on device
data, so a CUDA graph that holds them serves any lengths.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.launch import (
    can_start_early,
    ceil_div,
    early_launch,
    first_fitting,
    is_bare,
    num_programs,
    on,
    power_of_two,
    register_limit,
    side_stream,
)
from armillary.kernels.core.requirements import interpreted
from armillary.kernels.paged.decode_triton import decode
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.paged.prefill_triton import combine_prefill, prefill
from armillary.kernels.paged.softmax_triton import combine
from armillary.machine.accelerator import accelerator_of

_TILE_BYTES = 16384  # of the keys of a tile: with three stages of keys and values two programs fit a multiprocessor
_MAX_DECODE_ROWS = 64  # (query, head) pairs that the split kernel takes as one tile
_COMBINE_ROWS = 16  # rows of a tile of queries that a program adds up at a time, where keys were split
_SPLIT_KEYS = 512  # fewest keys per program of the prefill kernel, where keys are split
# elements that a program of the second launch adds up at a time: few enough that the next kernel fits beside it
_COMBINE_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of one launch."""

    queries: int  # rows of up to so many queries go to the split kernel
    m: int  # rows of a tile
    n: int  # keys of a tile
    warps: int  # per program
    stages: int  # of the load pipeline
    workers: int  # per multiprocessor, where a persistent grid processes work in equal parts
    early: bool = True  # start before the previous kernel has ended, where the GPU can
    ahead: int = 0  # tiles that are prefetched into L2 before that
    registers: int | None = None  # per thread, where programs of two kernels are to fit a multiprocessor


_AT_ONCE = 128  # tokens of a batch from which two streams are worth the fork and join
# per thread: eight warps of one kernel and four of the other use all of a multiprocessor's 65,536
_PROMPT_REGISTERS, _DECODE_REGISTERS = 192, 128


def paged_attention(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """See `armillary.kernels.paged.paged_attention.paged_attention`."""
    return (_launched if is_bare(q_TND) else _paged_attention)(
        q_TND,
        cache,
        batch.tables_BP,
        batch.starts,
        batch.lengths_B,
        options.sinks_N,
        options.slopes_N,
        options.scales_2K,
        options.scale_for(q_TND.shape[-1]),
        batch.max_query,
        options.window or options.chunk,
        options.chunk > 0,
        options.softcap,
    )


def _launched(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scales: Tensor | None,
    scale: float,
    max_query: int,
    window: int,
    chunked: bool,
    softcap: float,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_rows, heads = tables.shape[0], cache.shape[2]
    if not num_rows or not q.numel():
        return out.zero_()
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    if scale <= 0:  # kernels take the maximum before they multiply by the scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    group = q.shape[1] // heads
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    optional = (q if x is None else x.contiguous() for x in (sinks, slopes, scales))
    pointers = [q, cache, tables, starts.contiguous(), lengths.contiguous(), *optional, out]
    strides = (q.stride(0), *cache.stride()[:4], tables.stride(0))
    split = split_tiling(q.device, group, max_query, q.shape[2], cache.dtype)
    shape = {
        "WINDOW": window,
        "CHUNKED": chunked,
        "QUERIES": split.queries,
        # rows that a program searches to find its work; few sizes, as each is compiled separately
        "ROWS": 32 if num_rows <= 32 else max(256, power_of_two(num_rows)),
        "HEADS": heads,
        "GROUP": group,
        "D": q.shape[2],
        "D_PAD": max(16, power_of_two(q.shape[2])),
        "PAGE": cache.shape[3],
        "HAS_CAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": slopes is not None,
        "HAS_SCALES": scales is not None,
        "PRECISION": "tf32x3",  # for fp32: three MMAs that keep its precision
    }
    with on(q):
        if max_query <= split.queries:
            _launch_split(pointers, strides, shape, split, scale, softcap, num_rows)
        else:
            _launch_both(pointers, strides, shape, split, scale, softcap, num_rows)
    return out


_paged_attention = torch.library.custom_op("armillary::paged_attention", _launched, mutates_args=())


@_paged_attention.register_fake
def _(q, cache, tables, starts, lengths, sinks, slopes, scales, scale, max_query, window, chunked, softcap):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def split_tiling(device: torch.device, group: int, max_query: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """All sequences, where the queries of any of them fit one tile; else those of one or two tokens. As many stages as
    shared memory holds."""
    queries = max_query if group * max_query <= _MAX_DECODE_ROWS else max(1, 16 // group)
    m, width = max(16, power_of_two(group * queries)), max(16, power_of_two(head_dim)) * dtype.itemsize
    n = max(16, min(128, _TILE_BYTES // width))
    stages = first_fitting(device, (3, 2, 1), lambda count: _decode_bytes(device, count, m, n, width, dtype.itemsize))
    return Tiling(queries=queries, m=m, n=n, warps=4, stages=stages, workers=2, ahead=1)


def _decode_bytes(device: torch.device, stages: int, m: int, n: int, width: int, itemsize: int) -> int:
    """Shared memory of the split kernel, no less than it compiles to (tests/kernels/compile_for.py): keys, values and
    queries of all stages but one, and the weights; from 64 rows on 9.0 and 10.x use more of it for MMAs."""
    loaded, chip = (2 * n + m) * width, accelerator_of(device)
    if m < 64 or chip is None or chip.capability[0] not in (9, 10):
        return (stages - 1) * loaded + _TILE_BYTES
    return (stages + 1) * loaded if itemsize < 4 else (stages - 1) * loaded + _TILE_BYTES + m * width


def combine_tiling(sequence_heads: int, workers: int, rows: int, width: int) -> tuple[int, int]:
    """Rows and partial results that a program of the second launch adds up at a time. Two or three workers share a
    (sequence, KV head) pair where pairs are many, so that few programs do; many workers where pairs are few."""
    parts = max(4, min(32, power_of_two(workers // sequence_heads + 2)))
    return min(power_of_two(rows), max(1, _COMBINE_ELEMENTS // (parts * width))), parts


# (whether the cache is in fp32, largest head dim) -> (queries, keys, warps, stages, KB of shared memory that it
# compiles to for 8.x and 12.x), best first: the later ones are for less shared memory. fp32 takes three MMAs instead of
# one: larger tiles would spill registers.
_PROMPTS = {
    (False, 128): ((128, 64, 8, 3, 97), (64, 64, 4, 2, 57)),
    (False, 256): ((128, 64, 8, 2, 145), (64, 32, 4, 2, 69)),
    (True, 128): ((64, 32, 4, 2, 113), (64, 32, 4, 1, 81)),
    (True, 256): ((32, 16, 4, 2, 101), (32, 16, 4, 1, 81)),
}


def prefill_tiling(device: torch.device, group: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    width, least = max(16, power_of_two(head_dim)), power_of_two(group)
    tiles = _PROMPTS[dtype.itemsize == 4, 128 if width <= 128 else 256]
    m, n, warps, stages, _ = first_fitting(device, tiles, lambda tile: tile[4] << 10)
    return Tiling(queries=0, m=max(m, least), n=n, warps=warps, stages=stages, workers=1)


def prefill_splits(programs: int, slots: int) -> int:
    """Programs that may share the keys of a tile of queries, a power of two: short chunks of long contexts would not
    fill the GPU otherwise. `programs` is their number without sharing; how many share is decided on the device."""
    return 1 if programs >= 3 * slots else 8 if programs < slots else 4


def fits_beside(split: Tiling, parts: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a program of each kernel fits a multiprocessor (of Hopper's size): short chunks, whose keys are split,
    and registers that were measured to suffice for 16 rows of heads of up to 128 dims."""
    return parts > 1 and split.m == 16 and width <= 128 and dtype.itemsize == 2


def _launch_both(pointers, strides, shape, split, scale, softcap, num_rows):
    q, cache, *_ = pointers
    prompts = prefill_tiling(q.device, shape["GROUP"], shape["D"], cache.dtype)
    tiles, slots = q.shape[0] // (prompts.m // shape["GROUP"]), num_programs(q, prompts.workers)
    parts = prefill_splits(tiles * shape["HEADS"], slots)
    numbers = (scale, softcap, num_rows)
    at_once = q.shape[0] >= _AT_ONCE and can_start_early(q.device)
    if not (at_once and fits_beside(split, parts, shape["D_PAD"], cache.dtype)):
        _launch_split(pointers, strides, shape, split, *numbers)
        _launch_prefill(pointers, strides, shape, prompts, parts, *numbers)
        return
    split = replace(split, workers=1, early=False, registers=_DECODE_REGISTERS)
    here = torch.cuda.current_stream(q.device)
    side = side_stream(here)
    side.wait_stream(here)
    try:
        with torch.cuda.stream(side):
            _launch_split(pointers, strides, shape, split, *numbers)
        _launch_prefill(pointers, strides, shape, replace(prompts, registers=_PROMPT_REGISTERS), parts, *numbers)
    finally:
        here.wait_stream(side)


def _launch_split(pointers, strides, shape, tiling, scale, softcap, num_rows):
    q, *_, sinks, _, scales, out = pointers
    workers, width = num_programs(q, tiling.workers), shape["D_PAD"]
    partial = torch.empty(2 * workers * tiling.m * width, dtype=torch.float32, device=q.device)
    peaks = torch.empty(2 * workers * 2 * tiling.m, dtype=torch.float32, device=q.device)
    shared = torch.empty(5 * workers, dtype=torch.int32, device=q.device)
    early = tiling.early and can_start_early(q.device)
    decode[(workers,)](
        *pointers,
        partial,
        peaks,
        shared,
        scale,
        softcap,
        num_rows,
        q.shape[0],
        pointers[2].shape[1],
        pointers[1].shape[0],
        *strides,
        **shape,
        M=tiling.m,
        N=tiling.n,
        EARLY=early,
        PAIRS=_in_pairs(*pointers[:2]),
        AHEAD=tiling.ahead if pointers[1].numel() and pointers[2].numel() else 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **register_limit(q.device, tiling.registers),
        **early_launch(early),
    )
    rows = shape["GROUP"] * tiling.queries
    at_once, parts = combine_tiling(num_rows * shape["HEADS"], workers, rows, width)
    names = ("HEADS", "GROUP", "D", "D_PAD", "HAS_SINKS", "HAS_SCALES")
    combine[(workers, ceil_div(rows, at_once))](
        partial,
        peaks,
        shared,
        sinks,
        scales,
        out,
        **{name: shape[name] for name in names},
        M=tiling.m,
        R=at_once,
        PARTS=parts,
        EARLY=early,
        num_warps=4,
        **early_launch(early),
    )


def _in_pairs(q: Tensor, cache: Tensor) -> bool:
    """Whether values are in fp8 and can be read two at a time."""
    fits = cache.dtype == torch.float8_e4m3fn and q.dtype != torch.float32 and power_of_two(q.shape[2]) == q.shape[2]
    aligned = all(stride % 16 == 0 for stride in cache.stride()[:4]) and cache.data_ptr() % 16 == 0
    return fits and aligned and not interpreted()


def _launch_prefill(pointers, strides, shape, tiling, splits, scale, softcap, num_rows):
    q, _, _, starts, lengths, sinks, _, scales, out = pointers
    slots = num_programs(q, tiling.workers)
    most = (q.shape[0] // (tiling.m // shape["GROUP"]) + num_rows) * shape["HEADS"]
    programs = most * splits if splits > 1 else 0
    partial = torch.empty(programs * tiling.m * shape["D_PAD"], dtype=torch.float32, device=q.device)
    peaks = torch.empty(programs * 2 * tiling.m, dtype=torch.float32, device=q.device)
    parts = {"M": tiling.m, "N": tiling.n, "SPLITS": splits, "LEAST": max(1, _SPLIT_KEYS // tiling.n), "SLOTS": slots}
    prefill[(slots if splits > 1 else most,)](
        *pointers,
        partial,
        peaks,
        scale,
        softcap,
        num_rows,
        *strides,
        **shape,
        **parts,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **register_limit(q.device, tiling.registers),
    )
    if splits > 1:
        names = ("WINDOW", "CHUNKED", "QUERIES", "ROWS", "HEADS", "GROUP", "D", "D_PAD", "HAS_SINKS", "HAS_SCALES")
        combine_prefill[(4 * slots,)](
            partial,
            peaks,
            starts,
            lengths,
            sinks,
            scales,
            out,
            num_rows,
            **{name: shape[name] for name in names},
            **parts,
            R=min(_COMBINE_ROWS, tiling.m),
            num_warps=4,
        )
