"""Levers of training that need a GPU, pulled there: predicted, then obtained, as `benchmarks.levers` does it on a CPU.

    python -m benchmarks.planted.record_levers FOLDER [--only NAME …] [--device cuda] [--tiny]

Gauges of the runs are kept beside, so that their diagnosis can be made anywhere.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from armillary.store.home import Home
from benchmarks.planted.record import NARROW, Recording, measured_home
from benchmarks.planted.record_cases import asked_for
from benchmarks.planted.record_pulls import record_pulls
from tests.planted.lever_case import LeverCase

WIDE = {"num_layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14_336, "vocab": 1024}
"""layers of Llama 3 8B: products so large that the device is never short of work; few words, which are soon counted"""


def batch_size(at: Recording) -> LeverCase:
    """One short row at a time through a narrow model."""
    recipe = at.recipe(rows=8, micro_batch=1, sequence=256, model=NARROW)
    return LeverCase(name="batch size", key="layout.micro_batch", recipe=recipe, run=at.run)


def recompute_off(at: Recording) -> LeverCase:
    """Every layer's activations are made again, though there is memory to keep them."""
    recipe = at.recipe(
        rows=8, micro_batch=8, model=WIDE, layout={"recompute": "full"}, steps=20, train={"profile_every": 0}
    )
    return LeverCase(name="recompute off", key="layout.recompute", recipe=recipe, run=at.run)


CASES: dict[str, Callable[[Recording], LeverCase]] = {"recompute": recompute_off, "batch-size": batch_size}


def main() -> int:
    asked, begin = asked_for("record_levers", CASES), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-levers-") as folder:
        profiled = asked.device == "cuda" and "batch-size" in asked.only
        home = measured_home(folder, asked.device) if profiled else Home.at(folder)
        at = Recording(home, asked.device, tiny=asked.tiny)
        return record_pulls(
            asked, lambda name: CASES[name](at), lambda case: _warm(case, home), home, begin=begin, prefix="lever"
        )


def _warm(case: LeverCase, home: Home) -> None:
    """A few steps, in a run that nobody looks at: text is prepared and kernels are compiled."""
    run = case.run(replace(case.recipe, train=replace(case.recipe.train, steps=3)), home)
    run.folder.rename(run.folder.with_name(f".{run.folder.name}"))


if __name__ == "__main__":
    raise SystemExit(main())
