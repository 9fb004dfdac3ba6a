"""A kernel that says where the workers of a decode begin, to be looked at without the attention around it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from armillary.kernels.paged.decode_work_triton import worker_range


@triton.jit
def _look(starts, lengths, out, num_rows, WORKERS: tl.constexpr, N: tl.constexpr):
    for worker in range(WORKERS):
        _, begin, _, _, _ = worker_range(starts, lengths, num_rows, worker, WORKERS, N, 0, False, 1, 64, 1, "")
        tl.store(out + worker, begin)


def first_tiles(lengths: list[int], *, workers: int, keys: int) -> list[int]:
    """The first tile of each worker, for rows of one query and one KV head in tiles of so many keys."""
    out, starts = torch.zeros(workers, dtype=torch.int32), torch.arange(len(lengths) + 1, dtype=torch.int32)
    _look[(1,)](starts, torch.tensor(lengths, dtype=torch.int32), out, len(lengths), WORKERS=workers, N=keys)
    return [int(tile) for tile in out]
