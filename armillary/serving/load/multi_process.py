"""A load test with several sending processes: each sends every n-th request, or serves its share of the clients.

`python -m armillary.serving.load.multi_process FD` is a sending process: it prepares the job of its first message, and
answers the start time, its second message, with the results.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from armillary.errors import BadInput
from armillary.serving.load.sender import START_S, Sender, SendJob, SendResult, Watch
from armillary.serving.processes.worker_process import WorkerProcess, exit_text, serve_messages

_TICK_S = 0.25


def send_in_processes(job: SendJob, processes: int, watch: Watch | None = None) -> SendResult:
    """Run `job` in this process, or in `processes` others."""
    if processes < 2:
        return Sender(job).send(time.monotonic() + START_S, watch)
    jobs = split_job(job, processes)
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(WorkerProcess("armillary.serving.load.multi_process"))) for _ in jobs]
        pool = stack.enter_context(ThreadPoolExecutor(len(jobs)))
        for worker in workers:
            stack.callback(worker.kill)  # first of all, as the pool waits for its threads
        list(pool.map(_ask, workers, jobs))
        begin = time.monotonic() + START_S
        futures = [pool.submit(_ask, worker, begin) for worker in workers]
        while wait(futures, timeout=_TICK_S).not_done:
            if watch:
                watch(time.monotonic() - begin, 0, 0, 0)
        parts: list[SendResult] = [future.result() for future in futures]
    return SendResult(
        results=[result for sent in parts for result in sent.results],
        timer_delays_s=[delay for sent in parts for delay in sent.timer_delays_s],
        cpu_fraction=max(sent.cpu_fraction for sent in parts),
    )


def _ask(worker: WorkerProcess, message: SendJob | float) -> Any:
    """The reply of a sending process; BadInput where it has died, with its own message printed above."""
    if (reply := worker.ask(message)) is not None:
        return reply
    how = exit_text(worker.last_exit_code)
    raise BadInput(f"a sending process ended before its work was done ({how}); try fewer load.processes or clients")


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


if __name__ == "__main__":
    serve_messages(prepare=lambda job: Sender(job).send)
