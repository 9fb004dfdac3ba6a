"""Levers predicted and pulled: what the diagnosis said they would buy, and what they bought.

    python -m benchmarks.levers [--only NAME …] [--home DIR] [--write]

Each is a real run on this machine, diagnosed, its recipe changed as the diagnosis says, run again (`lever_case.py`).
Levers that need a GPU were pulled on an H200 by the same function; what it wrote is in `benchmarks/planted/recorded`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from armillary.profiling.machine import here
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.runs import Run
from benchmarks.lever_case import LeverCase, Pulled, pull
from benchmarks.planted.__main__ import measure_once
from benchmarks.planted.faults import Fault
from benchmarks.planted.problem import Wish
from benchmarks.planted.recorded import FOLDER
from benchmarks.planted.serve_small import serve_recipe, serving_recipe, warm
from benchmarks.planted.traffic import at_once, mixed, sharing
from benchmarks.planted.train_small import model_of, recipe_of, step_s, train_recipe

PAGE = Path(__file__).parent / "levers.md"
ENOUGH, WORTH, MANY = 6, 1.15, 4
"""levers that must be within what is allowed, and a gain that so many of them must obtain"""
_WISH = Wish()


def batch_size(home: Home) -> LeverCase:
    """A narrow model, one short row at a time."""
    tables = {"model": model_of(0.25), "layout": {"micro_batch": 1},
              "train": {"sequence": 32, "batch_tokens": 512, "steps": 24}}  # fmt: skip
    return LeverCase(name="batch size", key="layout.micro_batch", recipe=recipe_of(_WISH, tables), run=train_recipe)


def recompute_off(home: Home) -> LeverCase:
    """Every layer's activations are made again."""
    return LeverCase(name="recompute off", key="layout.recompute", run=train_recipe,
                     recipe=recipe_of(_WISH, {"layout": {"recompute": "full"}, "train": {"steps": 24}}))  # fmt: skip


def loader_workers(home: Home) -> LeverCase:
    """A store that takes twice as long for a batch as a step does."""
    slow = Fault(kind="slow source", amount=2 * step_s(_WISH, home))
    return LeverCase(name="loader workers", key="data.workers", run=partial(train_recipe, fault=slow),
                     recipe=recipe_of(_WISH, {"train": {"steps": 24}}))  # fmt: skip


def compiled(home: Home) -> LeverCase:
    """Blocks of many short operators between small products."""
    tables = {"layout": {"micro_batch": 4}, "train": {"batch_tokens": 2048, "steps": 24}}
    return LeverCase(name="compile", key="train.compile", run=train_recipe, recipe=recipe_of(_WISH, tables))


def prefix_cache(home: Home) -> LeverCase:
    """Equal beginnings, computed again for each request."""
    requests = sharing(48, prefixes=1, prefix_tokens=400, tokens_in=16, tokens_out=16, seed=0)
    return _served("prefix cache", "serve.prefix_cache", {"prefix_cache": False}, requests)


def chunk_size(home: Home) -> LeverCase:
    """Prompts go in by 32 tokens a step."""
    requests = mixed(24, tokens_in=(384, 512), tokens_out=(8, 8), seed=0)
    return _served("chunk size", "serve.max_tokens_per_step", {"max_tokens_per_step": 32, "prefill_tokens": None},
                   requests)  # fmt: skip


def _served(name: str, key: str, serve: dict[str, object], requests: list) -> LeverCase:  # type: ignore[type-arg]
    def run(recipe: Recipe, home: Home) -> Run:
        warm(recipe)
        return serve_recipe(recipe, home, at_once(requests))

    return LeverCase(name=name, key=key, recipe=serving_recipe(_WISH, {"serve": serve}), run=run)


CASES = {"batch-size": batch_size, "recompute": recompute_off, "workers": loader_workers, "compile": compiled,
         "prefix-cache": prefix_cache, "chunk-size": chunk_size}  # fmt: skip


# --- the table


def line(one: Pulled) -> list[str]:
    return [one.name, one.where, one.change, one.of, f"{one.predicted:.2f} ×", f"{one.obtained:.2f} ×",
            f"{abs(one.obtained - one.predicted):.2f}", f"{one.allowed:.2f}", "yes" if one.within else "no",
            f"{one.drift:.2f}"]  # fmt: skip


COLUMNS = ("lever", "on", "change", "of", "predicted", "obtained", "off by", "allowed", "within", "drift")


def holds(rows: list[Pulled]) -> bool:
    """Six kinds of lever within what is allowed, four of them worth it."""
    good = {one.name: one for one in rows if one.within}
    return len(good) >= ENOUGH and sum(one.obtained >= WORTH for one in good.values()) >= MANY


def as_page(rows: list[Pulled]) -> str:
    good = sum(one.within for one in rows)
    lines = ["# Levers: predicted and obtained", "",
             f"`python -m benchmarks.levers --write`, {time.strftime('%Y-%m-%d', time.gmtime())}, {here().text()}. The "
             "prediction is written down before the lever is pulled; allowed is max(0.03, 0.3 × (predicted − 1)). "
             "Drift: the first run made again over the first time.", "",
             f"{good} of {len(rows)} within; {sum(one.obtained >= WORTH for one in rows)} obtained at least "
             f"{WORTH} ×.", "",
             "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]  # fmt: skip
    return "\n".join([*lines, *("| " + " | ".join(line(one)) + " |" for one in rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--home", help="where runs are kept; default: a folder that is removed")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    asked = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = asked.home or stack.enter_context(tempfile.TemporaryDirectory(prefix="armillary-levers-"))
        home = Home(work=Path(folder).absolute(), cache=Home.default().cache)
        measure_once(home)
        for name in asked.only:
            rows.append(pull(CASES[name](home), home, where="cpu"))
            print("  ".join(line(rows[-1])), flush=True)
    rows += [Pulled.read(path) for path in sorted(FOLDER.glob("lever-*.json"))]
    if asked.write:
        PAGE.write_text(as_page(rows))
    return 0 if holds(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
