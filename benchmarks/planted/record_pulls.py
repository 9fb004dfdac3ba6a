"""Levers pulled on a GPU, for the scripts that record them: all cases are warmed up, then each is pulled alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from armillary.store.home import Home
from benchmarks.planted.record import keep_runs
from benchmarks.planted.record_cases import alone, beside, record_each
from tests.planted.lever_case import LeverCase, pull


def record_pulls(
    asked: argparse.Namespace,
    make: Callable[[str], LeverCase],
    warm: Callable[[LeverCase], None],
    home: Home,
    *,
    begin: float,
    prefix: str,
) -> int:
    """What was predicted and obtained of each, as PREFIX-NAME.json in the folder asked for; the exit code."""
    with beside(asked.folder):
        for name in asked.only:
            warm(make(name))
            print(f"{name} is warm [{time.monotonic() - begin:.0f} s]", flush=True)

    def record(name: str) -> str:
        try:
            with alone(asked.folder):
                where = "H200" if asked.device == "cuda" else "cpu"
                found = pull(make(name), home, where=where, most=asked.rounds)
        finally:
            keep_runs(home, asked.folder / name)
        found.write(asked.folder / f"{prefix}-{name}.json")
        return found.text()

    return record_each(asked.only, record, limit=asked.limit, begin=begin)
