"""What `armillary profile` calls as a step: a recipe's training step, or a function named on the command line.

Here training and profiling meet: neither knows of the other, a callable is handed from one to the other.
"""

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

from armillary.cli.data import on_bar
from armillary.cli.output import Output, path_text
from armillary.cli.train.planning import begin
from armillary.errors import BadInput, NotFound
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home

Step = Callable[[], object]


@contextmanager
def recipe_step(out: Output, home: Home, name: str, overrides: Sequence[str], device: str | None) -> Iterator[Step]:
    """The trainer's own step, data included; no run folder is made and nothing is exported."""
    begun = begin(out, home, one_device(load_recipe(Path(name), overrides)), device=device)
    from armillary.parallel.world import join_world
    from armillary.training.step.numerics import numerics
    from armillary.training.trainer import Trainer

    with out.progress("preparing", unit="B") as bar:
        begun.prepare(on_bar(bar))
    job = begun.recipe.train
    plan = replace(begun.plan, train=replace(job, profile_every=0))
    settings = numerics(tf32=plan.layout.precision == "tf32", deterministic=job.deterministic)
    with settings, join_world(device) as world, Trainer(plan, world) as trainer:
        steps = count()
        yield lambda: trainer.step(next(steps))


def one_device(recipe: Recipe) -> Recipe:
    """The recipe as one of its data-parallel ranks runs it, unsharded; gauges tell where ranks wait for each other."""
    layout = recipe.layout
    alone = replace(layout, dp=1, tp=1, zero=0, shard=None, pp=1, cp=1, ep=1, interleave=1, schedule="1f1b")
    tokens = max(recipe.train.sequence, recipe.train.batch_tokens // layout.dp)
    return replace(recipe, layout=alone, train=replace(recipe.train, batch_tokens=tokens))


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
    step = getattr(_module(module_name), attribute, None)
    if not callable(step):
        raise BadInput(f"{module_name} has no function '{attribute}'; write MODULE:FUNCTION, one without arguments")
    if needed := _needed(step):
        raise BadInput(f"{module_name}:{attribute} needs {', '.join(needed)}; give a function without arguments")

    @functools.wraps(step)
    def call() -> object:
        try:
            return step()
        except (Exception, SystemExit) as error:
            raise _theirs(f"{module_name}:{attribute}", error) from error

    return call


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, name.split(".")[0]):
            raise NotFound(f"no module '{name}' here; run from the folder it is in") from None
        raise _theirs(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        raise _theirs(f"importing {name}", error) from error


def _needed(step: Callable[..., object]) -> list[str]:
    """Names of the arguments it cannot be called without."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except ValueError:  # some built-in functions do not say
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def _theirs(what: str, error: BaseException) -> BadInput:
    """An error of the code that is profiled, with the last line of theirs that it went through."""
    if isinstance(error, SyntaxError):
        where = f"{path_text(Path(error.filename or ''))}:{error.lineno}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())] or frames
        where = f"{path_text(Path(own[-1].filename))}:{own[-1].lineno}" if own else "?"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return BadInput(f"{what} raised {said} ({where}); put that right first")
