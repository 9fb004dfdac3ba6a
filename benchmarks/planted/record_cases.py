"""Cases recorded one after the other: what is asked for, until time is up; a failed one is told and fails the whole.

Two programs may record into one folder: both warm up at once, and then take turns, so that neither disturbs the other.
"""

from __future__ import annotations

import argparse
import fcntl
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def asked_for(program: str, cases: Iterable[str]) -> argparse.Namespace:
    """folder, only, device, tiny and limit."""
    names = list(cases)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.planted.{program}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case is begun")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    return asked


def record_each(names: Iterable[str], record: Callable[[str], str], *, limit: float, begin: float) -> int:
    """What `record` says of each is printed; the exit code."""
    failed = 0
    for name in names:
        if time.monotonic() - begin > limit:
            print(f"{name} left out", flush=True)
            continue
        try:
            print(f"{record(name)} [{time.monotonic() - begin:.0f} s]", flush=True)
        except Exception:  # the others are still worth their time on a GPU
            traceback.print_exc()
            failed = 1
    return failed


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Other programs may do so too; nobody is alone meanwhile."""
    with _held(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other program that records into this folder does anything meanwhile."""
    with _held(folder, fcntl.LOCK_EX):
        yield


@contextmanager
def _held(folder: Path, how: int) -> Iterator[None]:
    with (folder / ".turn").open("w") as file:
        fcntl.flock(file, how)
        yield
