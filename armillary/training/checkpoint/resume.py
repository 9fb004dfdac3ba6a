"""Which run to resume: the newest unfinished one of this recipe, even if keys that may be edited freely differ.

A recipe's keys are free, noted or defining (spec/tables/resume_class.py). A run continues when no
defining key differs; where one does, or where another process is running the run, the command stops and says so:
nothing starts anew by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.spec.plan import Plan
from armillary.spec.recipe import KeyChange, Recipe, recipe_changes, recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run, Say, find_run, list_runs

WEIGHTS = "the weights it starts from"
_ENDED = ("interrupted", "failed", "died")
_NEW = "or start a new run with --new"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user asked for: a run to resume or to create by `name` (empty: the newest of the recipe), a `new` run
    even if there is an unfinished one, or to `take_over` a run that another process is running, which then stops.
    `file` is the recipe's, by which runs of one recipe are matched."""

    name: str = ""
    new: bool = False
    take_over: bool = False
    file: str = ""


def run_to_resume(home: Home, recipe: Recipe, weights: str, choice: Choice, say: Say = lambda text: None) -> Run | None:
    """The run to resume; None where a new one is to be created. BadInput where the user has to decide."""
    if choice.name:
        return _named(home, recipe, weights, choice, say)
    if choice.new:
        return None
    same = next(_same(home, recipe, weights), None)
    if same is None:
        _refuse_another(home, recipe, weights, choice.file)
        return None
    return None if same.state.state == "finished" else _free(same, choice, say)


def unfinished_run(home: Home, recipe: Recipe, weights: str) -> Run | None:
    """The newest run of this recipe, started from these weights, that is not running and not done; None where the
    newest one is done, or there is none."""
    states = ((run, run.state.state) for run in _same(home, recipe, weights))
    return next((run if state in _ENDED else None for run, state in states if state in (*_ENDED, "finished")), None)


def changes_since(run: Run, recipe: Recipe, weights: str) -> list[KeyChange]:
    """Keys in which a run's recipe differs from the present one, each with its class and both values; ArmillaryError
    where the run is none of training, or cannot be read."""
    try:
        plan, before = Plan.from_json(run.plan.read_text(), str(run.plan)), recipe_from_dict(run.recipe)
    except (OSError, KeyError) as error:
        raise BadInput(f"run {run.name} cannot be read ({error}); name another, {_NEW}") from error
    if plan.train is None:
        raise BadInput(f"run {run.name} is a server's; name another, {_NEW}")
    changes = recipe_changes(before, recipe)
    if plan.weights != weights:
        changes.append(KeyChange(key=WEIGHTS, kind="defining", before=plan.weights, now=weights))
    return changes


def texts(changes: Sequence[KeyChange], kind: str) -> list[str]:
    """The changes of one class as text."""
    return [change.text for change in changes if change.kind == kind]


def _named(home: Home, recipe: Recipe, weights: str, choice: Choice, say: Say) -> Run | None:
    try:
        run = find_run(home, choice.name)
    except NotFound:
        return None
    if choice.new:
        raise BadInput(f"run {run.name} is there already; give --new another name with --run, or none")
    changes = changes_since(run, recipe, weights)
    if defining := texts(changes, "defining"):
        raise BadInput(f"run {run.name} was started with another recipe ({_few(defining)}); restore it, {_NEW}")
    longer = any(change.key == "train.steps" for change in changes) and run.state.step < recipe.train.steps
    if run.state.state == "finished" and not longer:
        raise BadInput(f"run {run.name} is finished; give it more with --set train.steps=…, {_NEW}")
    return _free(run, choice, say)


def _free(run: Run, choice: Choice, say: Say) -> Run:
    """A run that no other process runs, or that may be taken over."""
    if not choice.take_over and run.is_held_elsewhere(say):
        raise BadInput(f"{run.held_text}; stop it, go on with it here with --take-over, {_NEW}")
    return run


def _same(home: Home, recipe: Recipe, weights: str) -> Iterator[Run]:
    """Runs, newest first, that differ in nothing that defines them."""
    for run, changes in _readable(home, recipe, weights):
        if not texts(changes, "defining"):
            yield run


def _refuse_another(home: Home, recipe: Recipe, weights: str, file: str) -> None:
    """An unfinished run of the same recipe file (or of the same model, where files are not known) whose defining keys
    were edited since: to begin anew would leave it behind without a word. One that is running is not left behind."""
    for run, changes in _readable(home, recipe, weights):
        known = bool(file and run.recipe_file)
        related = run.recipe_file == file if known else _source(run) == recipe.model.source
        state = run.state
        if not related or state.is_running:
            continue
        if state.state in _ENDED:
            step = state.step_text(" of ")
            raise BadInput(
                f"run {run.name} is unfinished (step {step}) and the recipe has become another "
                f"({_few(texts(changes, 'defining'))}); restore it to resume the run, {_NEW}"
            )
        return


def _readable(home: Home, recipe: Recipe, weights: str) -> Iterator[tuple[Run, list[KeyChange]]]:
    for run in list_runs(home):
        try:
            yield run, changes_since(run, recipe, weights)
        except ArmillaryError:
            continue


def _source(run: Run) -> str:
    model = run.recipe.get("model", {})
    return str(model.get("path") or model.get("name", ""))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
