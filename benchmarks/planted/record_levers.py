"""Levers of training that need a GPU, pulled there: predicted, then obtained, as `benchmarks.levers` does it on a CPU.

    python -m benchmarks.planted.record_levers FOLDER [--only NAME …] [--device cuda] [--tiny]

Gauges of the runs are kept beside, so that their diagnosis can be made anywhere.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from benchmarks.lever_case import LeverCase, pull
from benchmarks.planted.record import NARROW, Recording, keep_runs, measured_home
from benchmarks.planted.record_cases import asked_for, record_each

WIDE = {"num_layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14_336}
"""layers of Llama 3 8B: products so large that the device is never short of work"""


def batch_size(at: Recording) -> LeverCase:
    """One short row at a time through a narrow model."""
    recipe = at.recipe(rows=8, micro_batch=1, sequence=256, model=NARROW)
    return LeverCase(name="batch size", key="layout.micro_batch", recipe=recipe, run=at.run)


def recompute_off(at: Recording) -> LeverCase:
    """Every layer's activations are made again, though there is memory to keep them."""
    recipe = at.recipe(rows=8, micro_batch=8, model=WIDE, layout={"recompute": "full"})
    return LeverCase(name="recompute off", key="layout.recompute", recipe=recipe, run=at.run)


CASES: dict[str, Callable[[Recording], LeverCase]] = {"recompute": recompute_off, "batch-size": batch_size}


def main() -> int:
    asked, begin = asked_for("record_levers", CASES), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-levers-") as folder:
        at = Recording(measured_home(folder, asked.device), asked.device, tiny=asked.tiny)

        def record(name: str) -> str:
            try:
                found = pull(CASES[name](at), at.home, where="H200" if asked.device == "cuda" else asked.device, most=2)
            finally:
                keep_runs(at.home, asked.folder / name)
            found.write(asked.folder / f"lever-{name}.json")
            return found.text()

        return record_each(asked.only, record, limit=asked.limit, begin=begin)


if __name__ == "__main__":
    raise SystemExit(main())
