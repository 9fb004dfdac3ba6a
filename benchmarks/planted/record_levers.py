"""Levers that need a GPU, pulled there: predicted, then obtained, as `benchmarks.levers` does it on a CPU.

python -m benchmarks.planted.record_levers FOLDER [--only NAME …] [--device cuda] [--tiny]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.lever_case import LeverCase, pull
from benchmarks.planted.record import NARROW, Recording, measured_home


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted.record_levers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case is begun")
    asked = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-levers-") as folder:
        at = Recording(measured_home(folder, asked.device), asked.device, tiny=asked.tiny)
        for name in asked.only:
            if time.monotonic() - begin > asked.limit:
                print(f"{name} left out", flush=True)
                continue
            try:
                found = pull(CASES[name](at), at.home, where="H200")
                found.write(asked.folder / f"lever-{name}.json")
                print(f"{name} {found.change} predicted {found.predicted:.3f} obtained {found.obtained:.3f} within "
                      f"{found.within} [{time.monotonic() - begin:.0f} s]", flush=True)  # fmt: skip
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
