"""A test over several sending processes: each takes every n-th request, or its share of the clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context

from armillary.serving.load.drive import Driven, Job, Watch, drive

_START_S = 0.05
_AWAKE_S = 0.3
"""each process is kept so long, so that every one of them has started and imported what it needs"""


def drive_all(job: Job, processes: int, watch: Watch | None = None) -> Driven:
    """Run `job` in this process, or in `processes` others."""
    if processes < 2:
        return drive(job, time.monotonic() + _START_S, watch)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        wait([pool.submit(_awake) for _ in range(processes)])
        begin = time.monotonic() + _AWAKE_S
        futures = [pool.submit(drive, part, begin) for part in parts(job, processes)]
        while wait(futures, timeout=0.25).not_done:
            if watch:
                watch(time.monotonic() - begin, 0, 0, 0)
        found = [future.result() for future in futures]
    return Driven(
        answers=[answer for one in found for answer in one.answers],
        late_s=[late for one in found for late in one.late_s],
        cpu_fraction=max(one.cpu_fraction for one in found),
    )


def _awake() -> None:
    time.sleep(_AWAKE_S)


def parts(job: Job, count: int) -> list[Job]:
    """`job` in `count` pieces that together send what it would; clients and requests are shared out evenly."""
    share = _sharing(count)
    found = [
        replace(
            job, rows=job.rows[i::count], first=i, stride=count, clients=share(job.clients, i),
            most=None if job.most is None else share(job.most, i),
        )
        for i in range(count)
    ]  # fmt: skip
    return [part for part in found if part.rows or part.clients]


def _sharing(count: int) -> Callable[[int, int], int]:
    return lambda whole, place: whole // count + (place < whole % count)
