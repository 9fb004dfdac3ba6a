"""Latencies of a GPU: caches, memory and translation by chains of loads; shared memory, FFMA, atomics, barriers.

The same curves and the same plateaus as on a CPU, in one warp whose threads load one address.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from armillary.profiling.memory import gpu_texts as ptx
from armillary.profiling.memory.plateaus import Curve

LINE = 128
L1_SIZES = (2 << 10, 512 << 10)
L2_SIZES = (64 << 10, 1 << 30)
PER_OCTAVE = 8
PAGE = 2 << 20
_STEPS, _MOST_WARM = 4096, 1 << 19
_MOST_PAGES = 1 << 14

Watch = Callable[[int, int, str], None]


def run(text: str, *, address: int = 0, count: int = _STEPS, before: int = 0, threads: int = 32) -> tuple[float, float]:
    """(cycles, seconds) per instruction; the least cycles of three runs."""
    from armillary.profiling.memory.gpu_probes_triton import probe_kernel as kernel  # a CPU has no triton

    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    times = []
    for _ in range(3):
        kernel[(1,)](address, out, count, before, TEXT=text, THREADS=threads, num_warps=threads // 32)
        cycles, nanoseconds, _ = out.tolist()
        times.append((cycles / count, nanoseconds / count / 1e9))
    return min(times)


def sizes(bounds: tuple[int, int], per_octave: int = PER_OCTAVE) -> list[int]:
    low, high = bounds
    count = int(np.log2(high / low) * per_octave)
    return [round(low * 2 ** (i / per_octave) / LINE) * LINE for i in range(count + 1)]


def cache_curve(cache: str, quick: bool, watch: Watch) -> Curve:
    """(bytes, seconds) through L1 ('ca'), or from L2 on ('cg')."""
    random, bounds = np.random.default_rng(0), {"ca": L1_SIZES, "cg": L2_SIZES}[cache]
    wanted = sizes(bounds, 4 if quick else PER_OCTAVE)
    memory = torch.zeros(bounds[1] // 8, dtype=torch.int64, device="cuda")
    curve = []
    for done, size in enumerate(wanted):
        watch(done, len(wanted), f"{size:,} bytes")
        start, nodes = linked(memory, random.permutation(size // LINE) * LINE)
        _, seconds = run(ptx.chase(cache), address=start, before=min(nodes, _MOST_WARM) // 8 * 8)
        curve.append((float(size), seconds))
    return curve


def linked(memory: torch.Tensor, offsets: np.ndarray) -> tuple[int, int]:
    """Write the cycle through these offsets; (the first address, nodes)."""
    at = torch.from_numpy(np.ascontiguousarray(offsets)).to(memory.device)
    memory[at // 8] = at.roll(-1) + memory.data_ptr()
    return memory.data_ptr() + int(offsets[0]), len(offsets)


def translation_curve(quick: bool, watch: Watch) -> Curve:
    """(bytes that pages of 2 MiB span, seconds per load of one line in each), up to half of the free memory."""
    free = torch.cuda.mem_get_info()[0] // 2
    most = min(_MOST_PAGES // (8 if quick else 1), free // PAGE)
    memory, random = torch.zeros(most * PAGE // 8, dtype=torch.int64, device="cuda"), np.random.default_rng(1)
    counts = sorted({round(8 * 2 ** (i / 4)) for i in range(int(np.log2(most / 8) * 4) + 1)})
    curve = []
    for done, count in enumerate(counts):
        watch(done, len(counts), f"{count:,} pages")
        pages = random.permutation(count)
        start, nodes = linked(memory, pages * PAGE + pages * LINE % PAGE)  # another set of L2 for each page
        _, seconds = run(ptx.chase("cg"), address=start, before=max(8, nodes // 8 * 8))
        curve.append((float(count * PAGE), seconds))
    return curve


STRIDES = (1, 2, 3, 4, 8, 16, 17, 32, 33)


def shared_points(watch: Watch) -> Iterator[dict[str, Any]]:
    """A load from shared memory by the stride of a warp's words: conflicts of banks."""
    for done, stride in enumerate(STRIDES):
        watch(done, len(STRIDES), f"stride {stride}")
        yield _unit(f"shared memory, stride {stride}", 32, run(ptx.shared_loads(), before=stride))


def fma_points(watch: Watch) -> Iterator[dict[str, Any]]:
    """FFMA by its number of source registers, in one chain and in eight."""
    cases = [(chains, sources) for chains in (1, 8) for sources in (1, 2, 3)]
    for done, (chains, sources) in enumerate(cases):
        watch(done, len(cases), f"FFMA, {sources} sources")
        cycles, seconds = run(ptx.fma(sources, chains), before=1)
        what = f"FFMA, {sources} source registers, {chains} chains"
        yield _unit(what, 32, (cycles / chains, seconds / chains))


def atomic_points(watch: Watch) -> Iterator[dict[str, Any]]:
    memory = torch.zeros(64, dtype=torch.int64, device="cuda")
    watch(0, 1, "atomic add")
    yield _unit("atomic add", 32, run(ptx.atomic_add(), address=memory.data_ptr()))


def barrier_points(watch: Watch) -> Iterator[dict[str, Any]]:
    for done, warps in enumerate((1, 4, 8, 16, 32)):
        watch(done, 5, f"barrier of {warps} warps")
        yield _unit("barrier", 32 * warps, run(ptx.barrier(), threads=32 * warps))


UNITS: dict[str, Callable[[Watch], Iterator[dict[str, Any]]]] = {
    "shared memory": shared_points,
    "FFMA": fma_points,
    "atomics": atomic_points,
    "barriers": barrier_points,
}
"""cycles of single instructions"""


def _unit(what: str, threads: int, timed: tuple[float, float]) -> dict[str, Any]:
    cycles, seconds = timed
    date = time.strftime("%Y-%m-%d")
    return {"what": what, "threads": threads, "seconds": seconds, "beside": {"cycles": cycles, "date": date}}


def saxpy_points(quick: bool) -> Iterator[dict[str, Any]]:
    """y += a·x by loads of 32, 64 and 128 bits per thread."""
    from armillary.profiling.memory.gpu_probes_triton import saxpy_kernel

    count, threads, steps = (1 << 26 if quick else 1 << 28), 256, 8
    x, y = (torch.randn(count, device="cuda") for _ in range(2))
    for width in (1, 2, 4):
        block = threads * width
        grid = (-(-count // (block * steps)),)

        def call(block: int = block, grid: tuple[int] = grid) -> None:
            saxpy_kernel[grid](x, y, 0.5, count, BLOCK=block, STEPS=steps, num_warps=threads // 32)

        seconds = _timed(call)
        yield {
            "op": "saxpy",
            "by": f"{32 * width}-bit loads",
            "bytes": 8 * count,
            "width": 4 * width,
            "flops": 2.0 * count / seconds,
            "bytes_per_s": 12.0 * count / seconds,
            "beside": {"intensity": 1 / 6, "date": time.strftime("%Y-%m-%d")},
        }


def _timed(call: Callable[[], None], repeats: int = 7) -> float:
    call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    times_ms = sorted(float(before.elapsed_time(after)) for before, after in marks)
    return times_ms[repeats // 2] / 1e3
