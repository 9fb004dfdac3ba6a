"""A load test with several sending processes: each sends every n-th request, or serves its share of the clients."""

import pickle
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace

from armillary.errors import BadInput
from armillary.serving.load.sender import START_S, SendJob, SendResult, Watch, send_requests

_TICK_S = 0.25
READY = b"ready\n"
BEGIN = struct.Struct("d")
Process = subprocess.Popen[bytes]


def send_in_processes(job: SendJob, processes: int, watch: Watch | None = None) -> SendResult:
    """Run `job` in this process, or in `processes` others."""
    if processes < 2:
        return send_requests(job, watch=watch)
    with ExitStack() as stack:
        started = [_start(stack, part) for part in split_job(job, processes)]
        begin = _begin(started)
        pool = stack.enter_context(ThreadPoolExecutor(len(started)))
        futures = [pool.submit(_result, process) for process in started]
        while wait(futures, timeout=_TICK_S).not_done:
            if watch:
                watch(time.monotonic() - begin, 0, 0, 0)
        parts = [future.result() for future in futures]
    return SendResult(
        results=[result for sent in parts for result in sent.results],
        late_s=[late for sent in parts for late in sent.late_s],
        cpu_fraction=max(sent.cpu_fraction for sent in parts),
    )


def _start(stack: ExitStack, job: SendJob) -> Process:
    command = [sys.executable, "-m", "armillary.serving.load.multi_process"]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(_end, process)
    _write(process, pickle.dumps(job))
    return process


def _begin(started: list[Process]) -> float:
    """Once all processes are prepared, tell them when to begin."""
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != READY:
            raise _died(process)
    begin = time.monotonic() + START_S
    for process in started:
        _write(process, BEGIN.pack(begin))
    return begin


def _result(process: Process) -> SendResult:
    assert process.stdout is not None
    try:
        result: SendResult = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _died(process) from None
    return result


def _end(process: Process) -> None:
    process.kill()  # no effect on a process that has ended
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # unread input does not matter
        process.stdin.close()


def _write(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.flush()
    except BrokenPipeError:
        raise _died(process) from None


def _died(process: Process) -> BadInput:
    """The error of a process without a result; its own message is printed above."""
    process.kill()  # it may only have closed its output
    code = process.wait()
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return BadInput(f"a sending process ended before its work was done ({how}); try fewer load.processes or clients")


def split_job(job: SendJob, count: int) -> list[SendJob]:
    """`job` split into `count` jobs, with requests and clients distributed evenly."""

    def share(total: int, i: int) -> int:
        return total // count + (i < total % count)

    jobs = [
        replace(
            job,
            rows=job.rows[i::count],
            first=i,
            stride=count,
            clients=share(job.clients, i),
            max_requests=None if job.max_requests is None else share(job.max_requests, i),
        )
        for i in range(count)
    ]
    return [part for part in jobs if part.rows or part.clients]


def main() -> None:
    """A sending process, `python -m armillary.serving.load.multi_process`: reads its job from stdin, reports that it is
    prepared, waits for the start time, and writes its results to stdout."""
    job: SendJob = pickle.load(sys.stdin.buffer)

    def begin() -> float:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        return float(BEGIN.unpack(sys.stdin.buffer.read(BEGIN.size))[0])

    pickle.dump(send_requests(job, begin), sys.stdout.buffer)


if __name__ == "__main__":
    main()
