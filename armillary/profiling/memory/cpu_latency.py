"""Latencies of a CPU's caches, memory and address translation, by chains of dependent loads.

A working set is one cycle through its lines in random order, some pages at a time, so that prefetchers have nothing to
follow and a page is translated once for many lines. Translation is measured apart: one line per page, against the
same number of lines packed closely. A chain is timed in short slices, of which the
first quartile counts: other work only ever adds time.
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from armillary.machine.memory import available_bytes
from armillary.profiling.memory.plateaus import Curve
from armillary.profiling.memory.probes import probes

LINE = 128
"""bytes between nodes: two lines of most CPUs, which some fetch together, and one of the others. Sizes do not change,
since every other set of a cache stays empty"""
UNIT = 64 << 10
"""bytes in which lines are visited at random before the next ones: more than prefetchers follow, fewer pages than any
TLB has"""
PAGE = 4096
HUGE = 2 << 20
SMALLEST, LARGEST, QUICK_LARGEST = 4 << 10, 512 << 20, 64 << 20
PER_OCTAVE, PAGES_PER_OCTAVE = 6, 3
MOST_PAGES, LEAST_PAGES = 1 << 14, 8
_PASSES = 2
_STEPS, _LEAST_SLICES, _MOST_SLICES = 4096, 24, 400
"""loads that are timed at once: fewer than another process takes the core away from; and how many such slices"""
_QUANTILE = 0.25
_SHARE_OF_MEMORY = 0.25

Watch = Callable[[int, int, str], None]


def sizes(quick: bool) -> list[int]:
    """Working sets, by equal ratios, up to a quarter of the free memory."""
    largest = min(QUICK_LARGEST if quick else LARGEST, int((available_bytes() or LARGEST) * _SHARE_OF_MEMORY))
    return _ratios(SMALLEST, largest, PER_OCTAVE, 8 * LINE)


def page_counts(quick: bool) -> list[int]:
    return _ratios(LEAST_PAGES, MOST_PAGES // (2 if quick else 1), PAGES_PER_OCTAVE, 1)


def _ratios(least: int, most: int, per_octave: int, multiple: int) -> list[int]:
    results, value = [], float(least)
    while value <= most * 1.001:
        results.append(max(1, round(value / multiple)) * multiple)
        value *= 2 ** (1 / per_octave)
    return sorted(set(results))


def cache_curve(quick: bool, budget_s: float, watch: Watch) -> list[tuple[float, float]]:
    """Seconds per load over working sets; larger ones are left out when the time is over."""
    wanted, end = sizes(quick), time.monotonic() + budget_s
    memory = Memory(wanted[-1])
    random = np.random.default_rng(0)
    curve = []
    for done, size in enumerate(wanted):
        watch(done, len(wanted), f"{size:,} bytes")
        if time.monotonic() > end:
            break
        curve.append((float(size), memory.seconds(unit_by_unit(size, random))))
    return curve


def unit_by_unit(size: int, random: np.random.Generator) -> np.ndarray:
    """Offsets of all nodes below `size`, in the order of the cycle: units at random, their nodes at random."""
    unit = min(UNIT, size)
    nodes, units = unit // LINE, size // unit
    order = random.permutation(units)[:, None] * unit
    within = random.permuted(np.tile(np.arange(nodes) * LINE, (units, 1)), axis=1)
    offsets: np.ndarray = (order + within).reshape(-1)
    return offsets


def translation_curves(quick: bool, watch: Watch) -> tuple[list[tuple[float, float]], Curve]:
    """(bytes that the pages span, seconds per load): of one line per page, and of as many lines packed closely."""
    counts, random = page_counts(quick), np.random.default_rng(1)
    memory = Memory(counts[-1] * PAGE, huge=False)
    spread, close = [], []
    for done, count in enumerate(counts):
        watch(done, len(counts), f"{count:,} pages")
        line: np.ndarray = np.arange(count) * LINE % PAGE  # another set of the cache for each page
        pages = random.permutation(count)
        spread.append((float(count * PAGE), memory.seconds(pages * PAGE + line[pages])))
        close.append((float(count * PAGE), memory.seconds(random.permutation(count) * LINE)))
    return spread, close


class Memory:
    """Anonymous pages, already touched; huge ones where the system gives them."""

    def __init__(self, size: int, *, huge: bool = True) -> None:
        self._map = mmap.mmap(-1, -(-size // HUGE) * HUGE)
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice)
        self._words = np.frombuffer(self._map, dtype=np.uint64)
        self._words[:: PAGE // 8] = 1
        self.address = self._words.ctypes.data

    def seconds(self, offsets: np.ndarray) -> float:
        """Seconds per load of the cycle through these offsets, once all of it was visited."""
        following = np.roll(offsets, -1)
        self._words[offsets // 8] = (following + self.address).astype(np.uint64)
        last, run = ctypes.c_void_p(self.address + int(offsets[0])), probes().armillary_chase
        run(last, -(-len(offsets) // 8) * 8, ctypes.byref(last))
        slices = min(_MOST_SLICES, max(_LEAST_SLICES, _PASSES * len(offsets) // _STEPS))
        return float(np.quantile([run(last, _STEPS, ctypes.byref(last)) for _ in range(slices)], _QUANTILE)) / _STEPS


def over_close(spread: Curve, close: Curve) -> Iterator[tuple[float, float]]:
    """What translation adds to a load, above what its line's cache takes: the curve whose plateaus are TLB levels.
    The first point is the base that later ones are compared with."""
    base = spread[0][1]
    for (reach, seconds), (_, packed) in zip(spread, close, strict=True):
        yield reach, base + max(0.0, seconds - packed)
