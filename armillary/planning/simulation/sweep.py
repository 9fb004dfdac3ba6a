"""Simulations of one recipe with several values of its keys, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

from armillary.errors import BadInput
from armillary.machine.cores import usable_cores

MOST = 1000
"""most settings of a sweep"""


def settings_of(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of `key=value,value,…` as overrides: ("serve.max_running=4", "fleet.replicas=2")."""
    axes = []
    for text in sweeps:
        key, _, values = text.partition("=")
        values_given = [value.strip() for value in values.split(",") if value.strip()]
        if "." not in key or len(values_given) < 2:
            raise BadInput(f"--sweep {text} needs a key and two values or more; write it like serve.max_running=4,8,16")
        axes.append([f"{key.strip()}={value}" for value in values_given])
    combinations = list(product(*axes))
    if len(combinations) > MOST:
        raise BadInput(f"{len(combinations):,} settings are too many, at most {MOST:,} are tried; leave some out")
    return combinations


def swept(
    simulate: Callable[[tuple[str, ...]], dict[str, Any]], settings: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(setting, result) in order; `simulate` is importable and gets a setting. Processes are spawned, as a fork of one
    that has threads may hang."""
    workers = min(len(settings), usable_cores())
    if workers < 2:
        yield from ((setting, simulate(setting)) for setting in settings)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from zip(settings, pool.map(simulate, settings), strict=True)
