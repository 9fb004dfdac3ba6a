"""Compiling ahead of the bench: worker processes run each version of a case once, so that the compilers' caches on disk
hold what the timing process will ask for."""

import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from armillary.kernels.core.op import Case, Op, Version, find_op
from armillary.kernels.core.requirements import lacking, note_once
from armillary.kernels.core.version_trial import run_once
from armillary.machine.cores import usable_cores

LIMIT_S = 100.0
_COMPILED = ("triton", "compile")
_TRIES, _WAIT_S = 6, 3.0
"""for memory, which the workers share"""


def warm(cases: Sequence[tuple[Op, Case]], done: Callable[[int, int], None]) -> float:
    """Compile in worker processes, and say how many seconds it took; on a CPU, where cores compute too, nothing is
    compiled ahead."""
    begin = time.monotonic()
    jobs = [(op.name, case, version.name) for op, case in cases for version in compiled_versions(op, case)]
    if len(cases) < 2 or cases[0][1].device != "cuda":
        return 0.0
    jobs.sort(key=lambda job: job[2].startswith("triton"))  # torch.compile takes longest: it goes first
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=max(1, usable_cores() - 2), mp_context=context)
    waiting = [pool.submit(warm_version, *job) for job in jobs]
    try:
        for count, future in enumerate(as_completed(waiting, timeout=LIMIT_S), 1):
            future.result()
            done(count, len(jobs))
    except (TimeoutError, BrokenProcessPool) as error:  # then versions are compiled when they are timed
        note_once(f"compiling ahead was given up: {type(error).__name__}")
        for process in list((pool._processes or {}).values()):  # they would disturb what is timed next
            process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)
    return time.monotonic() - begin


def compiled_versions(op: Op, case: Case) -> list[Version]:
    """Those that need a compiler and can do the case."""
    return [
        version
        for version in (*op.versions, *op.rivals)
        if set(_COMPILED) & set(version.needs) and not (lacking(version.needs, case.device) or version.refuses(case))
    ]


def warm_version(name: str, case: Case, version: str) -> None:
    """In a worker: a forward and a backward on as many rows as the check takes."""
    torch._logging.set_logs(all=logging.ERROR)
    torch.set_num_threads(1)
    op = find_op(name)
    wanted = next(candidate for candidate in (*op.versions, *op.rivals) if candidate.name == version)
    for _ in range(_TRIES):
        try:
            generator = torch.Generator(torch.device(case.device)).manual_seed(0)
            run_once(wanted.load(), op, op.inputs(op.small(case), generator))
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(_WAIT_S)
        except Exception as error:  # what fails here fails again where it is reported
            logging.getLogger("armillary.kernels").info("%s %s: %s", name, version, error)
            break
    torch.cuda.empty_cache()
