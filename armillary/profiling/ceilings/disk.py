"""Disk: sequential and random reads and writes of a file of random bytes, past the page cache where possible.

Files are opened with O_DIRECT; a file system that refuses it is written through fsync and read after its pages were
dropped, and the point says so. Threads keep several requests in flight, as a loader's workers do.
"""

import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from armillary.kernels.core.timing import Timing, summary
from armillary.profiling.ceilings.settings import Settings

_MIB = 1 << 20
_SEQUENTIAL, _RANDOM = 4 * _MIB, 4096
_SLICES = 8
"""a case is timed in this many slices, whose rates give median and spread"""


def cases(settings: Settings) -> list[dict[str, Any]]:
    """No cases where less than ten times the file is free."""
    size = (64 if settings.quick else 512) * _MIB
    if shutil.disk_usage(settings.folder).free < 10 * size:
        return []
    folder = settings.folder.resolve()
    path = str(next(path for path in (folder, *folder.parents) if path.is_mount()))
    plan = [("write", 1), ("read", 1), ("read", 4), ("random_read", 1), ("random_read", 16), ("random_write", 1)]
    return [
        {
            "op": op,
            "threads": threads,
            "bytes": size,
            "block_bytes": _RANDOM if op.startswith("random") else _SEQUENTIAL,
            "path": path,
        }
        for op, threads in plan
    ]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """All cases on one file, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix=".armillary-disk-", dir=settings.folder) as folder:
        file = Path(folder) / "random.bin"
        written = False
        for case in chosen:
            if not written:
                _fill(file, case["bytes"])
                written = True
            timing, cache = _timed(file, case, settings)
            rate = {"bytes_per_s": case["block_bytes"] / timing.seconds}
            yield "disk", settings.point(case, timing, rate, page_cache=cache)


def _timed(file: Path, case: dict[str, Any], settings: Settings) -> tuple[Timing, str]:
    """Seconds per block, and how the page cache was bypassed."""
    writing = case["op"].endswith("write")
    handle, direct = _open(file, writing)
    try:
        dropped = direct or _drop(handle)
        offsets = _offsets(case)
        began = time.monotonic()
        budget_s = settings.budget_s * 10 / _SLICES
        samples = [_slice(handle, case, offsets, budget_s, direct=direct) for _ in range(_SLICES)]
    finally:
        os.close(handle)
    cache = "bypassed (O_DIRECT)" if direct else "dropped before" if dropped else "not avoided"
    return summary(samples, calls=1, method="host clock", began=began), cache


def _slice(handle: int, case: dict[str, Any], offsets: Iterator[int], budget_s: float, *, direct: bool) -> float:
    """Seconds per block over all threads together, for about `budget_s`."""
    block, writing = case["block_bytes"], case["op"].endswith("write")
    done, lock, end = [0], threading.Lock(), time.perf_counter() + budget_s

    def work() -> None:
        buffer = mmap.mmap(-1, block)  # anonymous maps are page-aligned, as O_DIRECT wants
        buffer.write(os.urandom(block))
        move: Callable[[int, Any, int], int] = os.pwritev if writing else os.preadv
        while time.perf_counter() < end:
            with lock:
                offset = next(offsets)
            move(handle, [buffer], offset)
            with lock:
                done[0] += 1
        buffer.close()

    begin = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(case["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if writing and not direct:
        os.fsync(handle)
    return (time.perf_counter() - begin) / max(1, done[0])


def _offsets(case: dict[str, Any]) -> Iterator[int]:
    """Block after block, cyclically, or at random."""
    blocks, block = case["bytes"] // case["block_bytes"], case["block_bytes"]
    draw = random.Random(0)
    for number in count():
        yield (draw.randrange(blocks) if case["op"].startswith("random") else number % blocks) * block


def _open(file: Path, writing: bool) -> tuple[int, bool]:
    """(descriptor, whether it goes past the page cache)."""
    flags = os.O_RDWR if writing else os.O_RDONLY
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            handle = os.open(file, flags | direct)
            with mmap.mmap(-1, _RANDOM) as probe:  # some file systems open it and then refuse to read
                os.preadv(handle, [probe], 0)
            return handle, True
        except OSError:
            pass
    return os.open(file, flags), False


def _drop(handle: int) -> bool:
    """Drop the file's pages from the page cache; False where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _fill(file: Path, size: int) -> None:
    """Random bytes, so that a disk that compresses or leaves out zeros shows its real speed."""
    block = os.urandom(_SEQUENTIAL)
    with file.open("wb", buffering=0) as out:
        for number in range(size // len(block)):
            out.write(block[number % 251 :] + block[: number % 251])
        os.fsync(out.fileno())
