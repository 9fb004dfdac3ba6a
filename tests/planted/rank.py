"""One rank of a run with a fault in it: `armillary.cli.train.rank` with the fault around it."""

from __future__ import annotations

from typing import Any

from armillary.cli.output import Output
from armillary.cli.train.rank import run_as_rank, train_run
from tests.planted.faults import Fault, planted


def train_with_fault(task: dict[str, Any], out: Output) -> dict[str, Any]:
    """Train as the task says, with its fault where it names one."""
    told = task["fault"]
    with planted(None if told is None else Fault(kind=told[0], amount=told[1])):
        return train_run(task, out)


if __name__ == "__main__":
    run_as_rank(train_with_fault)
