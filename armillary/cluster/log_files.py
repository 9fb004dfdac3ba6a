"""The log files of a job, as lines with their node in front, also while they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from armillary.cluster.job import Job

POLL_S = 0.5


def log_lines(job: Job, *, node: int | None = None) -> Iterator[str]:
    """What has been printed up to now, file after file."""
    return _Reader(job, node).lines(at_end=True)


def follow_lines(
    job: Job, is_over: Callable[[], bool], *, fetch: Callable[[Job], None] = lambda job: None, node: int | None = None
) -> Iterator[str]:
    """What is printed, as it arrives, until the job is over; `fetch` brings it into the job's folder."""
    reader = _Reader(job, node)
    while True:
        over = is_over()
        fetch(job)
        yield from reader.lines(at_end=over)
        if over:
            return
        time.sleep(POLL_S)


class _Reader:
    """Reads every file from where it stopped; complete lines only, until the end."""

    def __init__(self, job: Job, node: int | None) -> None:
        self.job, self.node = job, node
        self._read: dict[Path, int] = {}

    def _paths(self) -> list[Path]:
        pattern = "*.log" if self.node is None else f"node-{self.node}.log"
        return sorted(
            self.job.logs.glob(pattern), key=lambda path: (path.stem.startswith("node"), len(path.stem), path.stem)
        )

    def lines(self, *, at_end: bool) -> Iterator[str]:
        paths = self._paths()
        for path in paths:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            complete = len(new) if at_end else new.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + complete
            name = f"{path.stem.replace('-', ' ')} | " if len(paths) > 1 else ""
            for line in new[:complete].decode(errors="replace").splitlines():
                yield f"{name}{line}"
