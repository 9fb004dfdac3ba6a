"""A test over several sending processes: each takes every n-th request, or its share of the clients."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace

from armillary.errors import BadInput
from armillary.serving.load.sender import START_S, Driven, Job, Watch, drive
from armillary.serving.load.sender_process import BEGIN, READY

_TICK_S = 0.25
Process = subprocess.Popen[bytes]


def drive_all(job: Job, processes: int, watch: Watch | None = None) -> Driven:
    """Run `job` in this process, or in `processes` others."""
    if processes < 2:
        return drive(job, watch=watch)
    with ExitStack() as stack:
        started = [_start(stack, part) for part in parts(job, processes)]
        begin = _begin(started)
        pool = stack.enter_context(ThreadPoolExecutor(len(started)))
        futures = [pool.submit(_result, process) for process in started]
        while wait(futures, timeout=_TICK_S).not_done:
            if watch:
                watch(time.monotonic() - begin, 0, 0, 0)
        found = [future.result() for future in futures]
    return Driven(
        answers=[answer for one in found for answer in one.answers],
        late_s=[late for one in found for late in one.late_s],
        cpu_fraction=max(one.cpu_fraction for one in found),
    )


def _start(stack: ExitStack, job: Job) -> Process:
    command = [sys.executable, "-m", "armillary.serving.load.sender_process"]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(_end, process)
    _write(process, pickle.dumps(job))
    return process


def _begin(started: list[Process]) -> float:
    """When all are prepared, tell them the moment to begin."""
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != READY:
            raise _died(process)
    begin = time.monotonic() + START_S
    for process in started:
        _write(process, BEGIN.pack(begin))
    return begin


def _result(process: Process) -> Driven:
    assert process.stdout is not None
    try:
        found: Driven = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _died(process) from None
    return found


def _end(process: Process) -> None:
    process.kill()  # what has ended by itself does not mind
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # what it has not read does not matter
        process.stdin.close()


def _write(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError:
        raise _died(process) from None


def _died(process: Process) -> BadInput:
    """Why there is no result: what it said itself is above."""
    process.kill()  # one that only closed its output says no more either
    code = process.wait()
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return BadInput(f"a sending process ended before its work was done ({how}); try fewer load.processes or clients")


def parts(job: Job, count: int) -> list[Job]:
    """`job` in `count` pieces that together send what it would; clients and requests are shared out evenly."""
    share = _sharing(count)
    found = [
        replace(
            job,
            rows=job.rows[i::count],
            first=i,
            stride=count,
            clients=share(job.clients, i),
            most=None if job.most is None else share(job.most, i),
        )
        for i in range(count)
    ]
    return [part for part in found if part.rows or part.clients]


def _sharing(count: int) -> Callable[[int, int], int]:
    return lambda whole, place: whole // count + (place < whole % count)
