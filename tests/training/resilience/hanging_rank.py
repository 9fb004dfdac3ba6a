"""One rank of a run that will hang: `armillary.cli.train.rank` with a fault at step STEP of rank 1."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from armillary.cli.output import Output
from armillary.cli.train.rank import run_as_rank, train_run

STEP = 25


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def compute_for_ever() -> None:
    while True:
        pass


def wait_for_ever() -> None:
    time.sleep(3600)


IN_STEP: dict[str, Callable[[], None]] = {
    "stops": stop_itself,
    "dies": kill_itself,
    "computes": compute_for_ever,
}


def train_and_hang(task: dict[str, Any], out: Output) -> dict[str, Any]:
    """Train as the task says; the fault comes once, so that a run that restarts gets past it."""
    fault, mark = task["fault"], Path(task["once"])
    if os.environ["RANK"] != "1" or not fault or mark.exists():
        return train_run(task, out)
    with _faulty(fault, mark):
        return train_run(task, out)


def _faulty(fault: str, mark: Path) -> Any:
    from armillary.parallel.apply import Sharded
    from armillary.training.data.batch_sources import Batches
    from armillary.training.trainer import Trainer

    forward, read, total, steps = Trainer.forward_backward, Batches.at, Sharded.total, count()

    def in_step(self: Any, *args: Any) -> Any:
        if self.telemetry.progress.step == STEP:
            mark.touch()
            IN_STEP[fault]()
        return forward(self, *args)

    def in_loader(self: Any, step: int, **share: int) -> Any:
        if step == STEP:
            mark.touch()
            wait_for_ever()
        return read(self, step, **share)

    def without_all_reduce(self: Any, loss: Any) -> Any:
        """Once per step: leave out the collective that the other ranks are in."""
        if next(steps) == STEP:
            mark.touch()
            return loss
        return total(self, loss)

    if fault == "loader":
        return mock.patch.object(Batches, "at", in_loader)
    if fault == "skips":
        return mock.patch.object(Sharded, "total", without_all_reduce)
    return mock.patch.object(Trainer, "forward_backward", in_step)


if __name__ == "__main__":
    run_as_rank(train_and_hang)
