"""Lines for whoever watches a server; that nobody reads them any more is no reason to stop serving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

Say = Callable[[str], None]


def to_whom_it_concerns(say: Say) -> Say:
    """`say`, which may go into a pipe that its reader has closed: then the line is lost, and nothing else."""

    def tell(text: str) -> None:
        with suppress(OSError):
            say(text)

    return tell
