"""Levers predicted and pulled: what the diagnosis said they would buy, and what they bought.

    python -m benchmarks.levers [--only NAME …] [--sizes 1 2] [--home DIR] [--write]

Each is a real run here, diagnosed, its recipe changed as the diagnosis says, run again: `tests/planted/lever_case.py`.
Levers that need a GPU were pulled on an H200 by the same function; what it wrote is in `tests/planted/recorded`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.runs import Run
from benchmarks.planted.__main__ import measure_once
from tests.planted.faults import Fault
from tests.planted.lever_case import LeverCase, Pulled, pull
from tests.planted.lever_table import as_page, holds, line, summary
from tests.planted.problem import Wish
from tests.planted.recorded import FOLDER
from tests.planted.serve_small import Arrival, bearable, serve_recipe, serving_recipe, warm
from tests.planted.traffic import at_once, at_rate, mixed, sharing
from tests.planted.train_small import model_of, recipe_of, step_s, train_recipe

PAGE = Path(__file__).parent / "levers.md"


def batch_size(home: Home, wish: Wish) -> LeverCase:
    """A narrow model, one short row at a time."""
    job = {"sequence": 64, "batch_tokens": 512, "steps": 24}
    return _trained(
        "batch size",
        "layout.micro_batch",
        home,
        wish,
        model=model_of(0.5 * wish.size),
        layout={"micro_batch": 1},
        train=job,
    )


def recompute_off(home: Home, wish: Wish) -> LeverCase:
    """Every layer's activations are made again."""
    return _trained("recompute off", "layout.recompute", home, wish, layout={"recompute": "full"})


def loader_workers(home: Home, wish: Wish) -> LeverCase:
    """A store that takes twice as long for a batch as a step does."""
    return _trained(
        "loader workers",
        "data.workers",
        home,
        wish,
        Fault(kind="slow source", amount=2 * step_s(wish, home)),
        train={"steps": 20},
    )


def compiled(home: Home, wish: Wish) -> LeverCase:
    """Blocks whose norms, rotations and activations are operators of their own."""
    return _trained("compile", "train.compile", home, wish)


def _trained(
    name: str, key: str, home: Home, wish: Wish, fault: Fault | None = None, **tables: Mapping[str, Any]
) -> LeverCase:
    job = {"batch_tokens": 2048, "steps": 40, **tables.get("train", {})}
    recipe = recipe_of(wish, {**tables, "train": job}, home)
    return LeverCase(name=name, key=key, recipe=recipe, run=partial(train_recipe, fault=fault))


def prefix_cache(home: Home, wish: Wish) -> LeverCase:
    """Equal beginnings, computed again for each request."""
    requests = sharing(96, prefixes=1, prefix_tokens=400, tokens_in=16, tokens_out=16, seed=0)
    return _served("prefix cache", "serve.prefix_cache", wish, {"prefix_cache": False}, at_once(requests))


def chunk_size(home: Home, wish: Wish) -> LeverCase:
    """Long prompts go in whole among requests that are being answered, whose next tokens wait."""
    chats = mixed(8, tokens_in=(16, 32), tokens_out=(380, 400), seed=0)
    essays = mixed(30, tokens_in=(1200, 1300), tokens_out=(4, 8), seed=1, name="long")
    lasts_s = len(chats) / bearable(serving_recipe(wish, {}), chats)
    return _served(
        "chunk size",
        "serve.prefill_tokens",
        wish,
        {"prefill_tokens": None, "max_tokens_per_step": 8192},
        [*at_once(chats), *at_rate(essays, len(essays) / lasts_s, 0)],
    )


def _served(name: str, key: str, wish: Wish, serve: dict[str, object], arrivals: Sequence[Arrival]) -> LeverCase:
    def run(recipe: Recipe, home: Home) -> Run:
        warm(recipe)
        return serve_recipe(recipe, home, arrivals)

    return LeverCase(name=name, key=key, recipe=serving_recipe(wish, {"serve": serve}), run=run)


CASES = {
    "batch-size": batch_size,
    "recompute": recompute_off,
    "workers": loader_workers,
    "compile": compiled,
    "prefix-cache": prefix_cache,
    "chunk-size": chunk_size,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--sizes", nargs="+", type=float, default=[1.0], help="of the models: 1 2 pulls each lever twice"
    )
    parser.add_argument("--home", help="where runs are kept; default: a folder that is removed")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    asked = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = asked.home or stack.enter_context(tempfile.TemporaryDirectory(prefix="armillary-levers-"))
        home = Home(work=Path(folder).absolute(), cache=Home.default().cache)
        measure_once(home)
        for name, size in product(asked.only, asked.sizes):
            rows.append(pull(CASES[name](home, Wish(size=size)), home, where="cpu"))
            rows[-1].write(home.work / f"lever-{name}-{size:g}.json")
            print("  ".join(line(rows[-1])), flush=True)
    rows += [Pulled.read(path) for path in sorted(FOLDER.glob("lever-*.json"))]
    print(summary(rows))
    if asked.write:
        PAGE.write_text(as_page(rows))
    return 0 if holds(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
