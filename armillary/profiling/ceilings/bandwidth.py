"""Memory bandwidth over working sets: copy, read, write and triad, from memory and from the caches.

`bytes` of a point is all traffic of one operation, read and written together; a copy of n bytes counts 2n. Points of
kind copy, read, write and triad come from memory: buffers rotate through a pool several times the last-level cache.
Points of kind cache use the same buffers repeatedly.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from armillary.kernels.core.random_inputs import Pool, random_row, set_elements
from armillary.profiling.ceilings.settings import Settings

_MIB = 1 << 20
_TIMES_CACHE = 4
_DTYPE = torch.float32
_SLACK = 1024
"""elements beyond the largest buffer, so that it can be aligned"""


OPS: dict[str, tuple[int, Callable[..., Any]]] = {
    "copy": (2, lambda a, b: a.copy_(b)),
    "read": (1, torch.sum),
    "write": (1, lambda a: a.fill_(0.37)),
    "triad": (3, lambda a, b, c: torch.add(b, c, alpha=0.37, out=a)),
}
"""name -> (number of buffers, operation); triad is a = b + s·c"""


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Working sets from memory, then those that stay in a cache."""
    memory = [{"op": op, "bytes": size, "hot": False} for size in _memory_sizes(settings) for op in OPS]
    return memory + [{"op": op, "bytes": size, "hot": True} for size in _cache_sizes(settings) for op in OPS]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """A point per case; each buffer of an operation comes from a row of its own."""
    wanted = max(_TIMES_CACHE * settings.cache_bytes, _memory_sizes(settings)[-1])
    elements = int(min(settings.free_bytes / 3, wanted)) // _DTYPE.itemsize
    rows = [random_row(elements // share + _SLACK, _DTYPE, settings.device, seed=share) for share in (1, 2, 3)]
    for case in chosen:
        num_buffers, operation = OPS[case["op"]]
        length = case["bytes"] // num_buffers // _DTYPE.itemsize
        moved = length * num_buffers * _DTYPE.itemsize
        used = rows[:num_buffers]
        sets = 1 if case["hot"] else min(row.numel() for row in used) // set_elements([(length,)])
        columns = [Pool(row).sets(sets, [(length,)]) for row in used]
        calls = [partial(operation, *(buffer for (buffer,) in buffers)) for buffers in zip(*columns, strict=True)]
        timing = settings.time(*calls)
        tried = {"bytes": case["bytes"]} | ({"op": case["op"]} if case["hot"] else {})
        rate = {"bytes_per_s": moved / timing.seconds}
        yield ("cache" if case["hot"] else case["op"]), settings.point(tried, timing, rate, buffers=sets)


def _memory_sizes(settings: Settings) -> list[int]:
    """From a few MiB to well past the last-level cache, in steps of four, up to a third of memory."""
    limit = settings.free_bytes / 3
    largest = (8192 if settings.on_cuda else 256 if settings.quick else 1024) * _MIB
    while largest < 3 * settings.cache_bytes:
        largest *= 2
    while largest > limit and largest > _MIB:
        largest //= 2
    sizes = [largest >> (2 * step) for step in range(2 if settings.quick else 5)]
    return sorted(size for size in sizes if size >= _MIB)


def _cache_sizes(settings: Settings) -> list[int]:
    """Below half of the last-level cache, in steps of eight; on a GPU one size: smaller ones measure the launch."""
    sizes: list[int] = []
    size = settings.cache_bytes // 2 // 4096 * 4096
    while size >= _MIB // 4 and len(sizes) < (1 if settings.quick or settings.on_cuda else 3):
        sizes.append(size)
        size = size // 8 // 4096 * 4096
    return sorted(sizes)
