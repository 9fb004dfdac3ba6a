"""Levers that need a GPU, pulled there: predicted, then obtained, as `benchmarks.levers` does it on a CPU.

python -m benchmarks.planted.record_levers FOLDER [--only NAME …] [--device cuda] [--tiny]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from benchmarks.lever_case import LeverCase, pull
from benchmarks.planted.record import NARROW, Recording, measured_home
from benchmarks.planted.record_cases import asked_for, record_each


def batch_size(at: Recording) -> LeverCase:
    """One short row at a time through a narrow model."""
    recipe = at.recipe(rows=8, micro_batch=1, sequence=256, model=NARROW)
    return LeverCase(name="batch size", key="layout.micro_batch", recipe=recipe, run=at.run)


def compiled(at: Recording) -> LeverCase:
    """The same launches, fewer of them once blocks are compiled."""
    recipe = at.recipe(rows=8, micro_batch=1, sequence=256, model=NARROW)
    return LeverCase(name="compile", key="train.compile", recipe=recipe, run=at.run)


def recompute_off(at: Recording) -> LeverCase:
    """Every layer's activations are made again."""
    recipe = at.recipe(rows=8, micro_batch=8, layout={"recompute": "full"})
    return LeverCase(name="recompute off", key="layout.recompute", recipe=recipe, run=at.run)


CASES: dict[str, Callable[[Recording], LeverCase]] = {
    "batch-size": batch_size, "recompute": recompute_off, "compile": compiled
}  # fmt: skip


def main() -> int:
    asked, begin = asked_for("record_levers", CASES), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-levers-") as folder:
        at = Recording(measured_home(folder, asked.device), asked.device, tiny=asked.tiny)

        def record(name: str) -> str:
            found = pull(CASES[name](at), at.home, where="H200")
            found.write(asked.folder / f"lever-{name}.json")
            return (f"{name} {found.change} predicted {found.predicted:.3f} obtained {found.obtained:.3f} within "
                    f"{found.within}")  # fmt: skip

        return record_each(asked.only, record, limit=asked.limit, begin=begin)


if __name__ == "__main__":
    raise SystemExit(main())
