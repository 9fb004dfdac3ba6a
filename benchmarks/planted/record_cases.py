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
from typing import IO


def asked_for(program: str, cases: Iterable[str]) -> argparse.Namespace:
    """folder, only, device, tiny, limit and rounds."""
    names = list(cases)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.planted.{program}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case is begun")
    parser.add_argument("--rounds", type=int, default=2, help="how often a lever is pulled at most")
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
    with (folder / ".turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def alone(folder: Path, patience_s: float = 400.0) -> Iterator[None]:
    """No other program that records into this folder does anything meanwhile, unless it takes too long over it."""
    begin = time.monotonic()
    with (folder / ".turn").open("w") as file:
        while not _taken(file):
            if time.monotonic() - begin > patience_s:
                print("not alone", flush=True)
                break
            time.sleep(0.2)
        yield
    time.sleep(0.5)  # whoever waits is next


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
