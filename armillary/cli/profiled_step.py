"""What `armillary profile` calls as a step: a recipe's training step, or a function named on the command line.

Here training and profiling meet: neither knows of the other, a callable is handed from one to the other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from armillary.cli.data import on_bar
from armillary.cli.output import Output
from armillary.cli.train import begin
from armillary.errors import BadInput, NotFound
from armillary.spec.recipe import load_recipe
from armillary.store.home import Home

Step = Callable[[], object]


@contextmanager
def recipe_step(out: Output, home: Home, name: str, overrides: Sequence[str], device: str | None) -> Iterator[Step]:
    """The trainer's own step, data included; no run folder is made and nothing is exported."""
    begun = begin(out, home, load_recipe(Path(name), overrides), device=device)
    from armillary.model.device import pick_device
    from armillary.training.loop import Trainer
    from armillary.training.precision import numerics

    with out.progress("preparing", unit="B") as bar:
        begun.prepare(on_bar(bar))
    job = begun.recipe.train
    plan = replace(begun.plan, train=replace(job, eval_every=0))
    with numerics(tf32=plan.layout.precision == "tf32", deterministic=job.deterministic):
        trainer = Trainer(plan, device=pick_device(device))
        steps = (n % max(1, job.steps - 1) for n in count())  # the last one validates, which is no step
        yield lambda: trainer.step(next(steps))


@contextmanager
def callable_step(out: Output, home: Home, name: str, overrides: Sequence[str], device: str | None) -> Iterator[Step]:
    """MODULE:FUNCTION, found from the current folder as Python would."""
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield _callable(module_name, attribute)
    finally:
        sys.path.remove(str(Path.cwd()))


def _callable(module_name: str, attribute: str) -> Step:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        raise NotFound(f"no module '{module_name}' here; run from the folder it is in") from None
    step = getattr(module, attribute, None)
    if not callable(step):
        raise BadInput(f"{module_name} has no function '{attribute}'; write MODULE:FUNCTION, one without arguments")
    made: Step = step
    return made
