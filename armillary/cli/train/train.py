"""`armillary train`: plan the recipe, start its ranks, and show their progress; continues an unfinished run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.data import on_bar, say_prepared
from armillary.cli.main import USER_ERROR
from armillary.cli.open_model import need_torch
from armillary.cli.output import Output
from armillary.cli.train.draft_for import train_draft_head
from armillary.cli.train.nodes import fitted_to, train_on_nodes
from armillary.cli.train.planning import begin, planned, refuse_days, seconds_left
from armillary.cli.train.view import TrainView, outcome_of, say_end
from armillary.cli.verb_decorator import moved, set_option, verb, yes_option
from armillary.errors import ArmillaryError, BadInput
from armillary.spec.recipe import Recipe, load_recipe
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.runs import find_run
from armillary.units import bytes_text, count_text, duration_text, seconds_text

if TYPE_CHECKING:
    from armillary.store.runs import Run
    from armillary.training.prepare_run import ResolvedRun
    from armillary.training.stopping import Until


@verb
@click.argument("recipe", type=click.Path(path_type=Path))
@set_option
@yes_option
@click.option("--devices", type=int, metavar="N", help="Use N devices: dp is as large as fills them.")
@click.option("--nodes", metavar="MIN:MAX[@HOST:PORT]", help="Let so many nodes of --devices each come and go.")
@click.option("--run", "name", metavar="NAME", help="Resume this run, or begin one of this name.")
@click.option("--new", is_flag=True, help="Begin a new run, even where unfinished ones exist.")
@click.option(
    "--take-over",
    is_flag=True,
    hidden=True,
    help="Resume a run that another process is running, and stop that process.",
)
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option(
    "--draft-for", metavar="MODEL", help="Train a draft head for MODEL, a run or a folder, and keep it there."
)
@click.option("--dry-run", is_flag=True, help="Plan and check everything; stop before anything is written.")
@moved("--parity", "try armillary parity", is_flag=True)
@moved("--only", "name strategies and formats, like armillary parity pp fp32")
@moved("--page", "name the page, like armillary parity docs/page.md")
@moved("--random-weights", "try --set train.from_scratch=true", is_flag=True)
@moved("--from", "try --set model.path=FOLDER, or --set model.name=NAME for a run or a Hub id")
@moved("--until", "try --set train.until=val_loss=3.2")
def train(
    out: Output,
    home: Home,
    recipe: Path,
    overrides: tuple[str, ...],
    devices: int | None,
    nodes: str | None,
    name: str | None,
    new: bool,
    take_over: bool,
    device: str | None,
    draft_for: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Train the model of RECIPE, on one device or many, and export it as a Hugging Face folder.

    A name of the catalogue starts from scratch; a folder, a run or a Hub id (--set model.path=…, model.name=…) starts
    from its weights. An unfinished run of the recipe is resumed where it stopped, on any layout; where the recipe has
    since become another, the command stops and asks for --new.

    Starts its own processes on this machine, or joins those of torchrun and srun. Ctrl-C saves and stops.

    --nodes MIN:MAX runs on MIN to MAX nodes, which meet at HOST:PORT: start the same command on each. When one is lost
    or joins, the run goes on from its newest checkpoint with fewer or more data-parallel ranks and the same batches.
    """
    need_torch("training")
    if draft_for is not None:
        if name or new or take_over or nodes or dry_run or devices not in (None, 1):
            raise BadInput(
                "--draft-for trains a head on one device, without a run of its own; leave the other flags out"
            )
        outcome = train_draft_head(out, home, load_recipe(recipe, overrides), draft_for, device=device)
        return out.result(outcome, quiet=outcome["folder"])
    from armillary.parallel.world import is_launched
    from armillary.training.stopping import Until

    asked = _asked(load_recipe(recipe, overrides), devices if nodes is None else None)
    settings: dict[str, Any] = {"device": device, "until": Until.of(asked.train)}
    choice = {"name": name or "", "new": new, "take_over": take_over, "file": str(recipe.absolute())}
    texts: dict[str, Any] = {"text": recipe.read_text(), "overrides": overrides, **choice}
    planning: dict[str, Any] = settings | {"devices": devices, "fills": devices}
    if is_launched() and not dry_run:
        return train_joined(out, home, asked, planning, elastic=nodes is not None, **texts, **settings)
    if nodes is not None and not dry_run:
        opener = lambda shown, begun: _open_run(shown, begun, recipe.read_text(), overrides, choice)  # noqa: E731
        outcome = train_on_nodes(out, home, asked, nodes, devices, planning=settings, open_run=opener)
        say_end(out, find_run(home, outcome["run"]), outcome)
        return out.result(outcome, quiet=outcome["run"])
    begun = begin(out, home, asked, **planning)
    refuse_days(begun, yes=yes)
    if dry_run:
        return out.result({"plan": begun.plan})
    outcome = run_training(out, begun, **texts, **settings)
    out.result(outcome, quiet=outcome["run"])


def _asked(recipe: Recipe, devices: int | None) -> Recipe:
    if devices is None:
        return recipe
    if devices < 1:
        raise BadInput(f"--devices {devices} is nothing to train on; give at least 1")
    inner = recipe.layout.num_devices // recipe.layout.dp
    # what does not fill them is refused where the model is known, with a layout that does
    return recipe if devices % inner else replace(recipe, layout=recipe.layout.on_devices(devices))


# --- in this process, in processes of our own, or in those of torchrun


def run_training(
    out: Output,
    begun: ResolvedRun,
    *,
    text: str,
    overrides: tuple[str, ...],
    device: str | None = None,
    until: Until | None = None,
    brief: bool = False,
    **choice: Any,
) -> dict[str, Any]:
    """Prepare the data, open the run, train, and report how it ended; `brief` leaves out single steps, and `choice`
    (name, new, take_over, file) selects the run."""
    from armillary.training.prepare_run import refuse_elsewhere

    refuse_elsewhere(begun.plan)
    begun, run = _open_run(out, begun, text, overrides, choice, brief=brief)
    if begun.plan.layout.num_devices == 1:
        outcome = _train_here(out, begun, run, device, until, brief=brief)
    else:
        outcome = _launch(out, begun, run, device, until, brief=brief)
    say_end(out, run, outcome, brief=brief)
    return outcome


def _open_run(
    out: Output,
    begun: ResolvedRun,
    text: str,
    overrides: tuple[str, ...],
    choice: dict[str, Any],
    *,
    brief: bool = False,
) -> tuple[ResolvedRun, Run]:
    from armillary.training.checkpoint.resume import Choice

    chosen = Choice(**choice)
    before = begun.to_resume(chosen, out.say)  # what is for a person to decide is said before any text is prepared
    began = time.perf_counter()
    with out.progress("preparing", unit="B") as bar:
        prepared = begun.prepare(on_bar(bar))
    more: dict[str, Any] = {"text": text, "overrides": overrides, "preparing_s": time.perf_counter() - began}
    for each in prepared:
        if not (brief and each.reused):
            say_prepared(out, each)
    if before is not None:
        begun = _resumed(out, begun, before)
        origin = _resumed_text(out, begun, before)
        run = begun.take_over(before, chosen, say=out.say, **more)
    else:
        run = begun.create_run(name=chosen.name, new=chosen.new, file=chosen.file, **more)
        origin = f"new run {run.id}"
    job, planned = begun.recipe.train, begun.plan.predicted
    out.say(
        f"planned {duration_text(planned['step_s'])}/step, {bytes_text(planned['memory_peak_bytes'])}/device · "
        f"{origin} · {job.steps:,} steps of {count_text(job.batch_tokens)} tokens · {_saves(job, planned['step_s'])} · "
        f"{end_text(begun, run)}"
    )
    return begun, run


def _resumed(out: Output, begun: ResolvedRun, run: Run) -> ResolvedRun:
    """The start with the settings that a resumed run retains, planned again where that makes a difference."""
    resumed = begun.with_settings_of(run)
    if (resumed.plan.layout, resumed.plan.train) == (begun.plan.layout, begun.plan.train):
        return resumed
    for note in resumed.plan.notes:
        if note not in begun.plan.notes:
            out.warn(note)
    return planned(resumed)[0]


def end_text(begun: ResolvedRun, run: Run) -> str:
    """'ends about 14:05 (12:30)', with the day where that is not today."""
    left = seconds_left(begun, run)
    now, end = time.localtime(), time.localtime(time.time() + left)
    day = "" if now[:3] == end[:3] else time.strftime("%Y-%m-%d ", end)
    return f"ends about {day}{time.strftime('%H:%M', end)} (in {seconds_text(left)})"


def _saves(job: TrainJob, step_s: float) -> str:
    from armillary.training.checkpoint.interval import EVERY_S, interval_steps

    steps = interval_steps(job, step_s)
    if not steps:
        return "a checkpoint at the end"
    about = "" if job.save_every else f" or so ({seconds_text(max(EVERY_S, step_s))})"
    return f"checkpoints every {steps:,} steps{about}"


def _resumed_text(out: Output, begun: ResolvedRun, run: Run) -> str:
    """Where an unfinished run continues, and why it had ended; edits since then are reported."""
    from armillary.training.checkpoint.checkpoint import saved_steps
    from armillary.training.checkpoint.resume import texts

    if noted := texts(begun.changes_since(run), "noted"):
        out.say(f"run {run.name} continues with changes: {', '.join(noted)}")
    steps = saved_steps(run)
    where = f"from step {steps[-1]:,}" if steps else "from the beginning (no checkpoint yet)"
    failed = f", which had failed ({run.state.error})" if run.state.error else ""
    return f"continues run {run.id} {where}{failed}"


def _train_here(
    out: Output, begun: ResolvedRun, run: Run, device: str | None, until: Until | None, *, brief: bool
) -> dict[str, Any]:
    from armillary.training.loop import train as library_train

    with TrainView(out, begun.plan, run, brief=brief) as view:
        done = library_train(
            begun.plan,
            run,
            device=device,
            until=until,
            watch=view,
            say=out.warn,
            home=begun.home,
            leaving=lambda done: say_end(out, run, outcome_of(done), brief=brief),
        )
    return outcome_of(done)


def _launch(
    out: Output, begun: ResolvedRun, run: Run, device: str | None, until: Until | None, *, brief: bool
) -> dict[str, Any]:
    """Train in ranks that this process starts; a failure is recorded here, because a rank may be killed before it
    can."""
    from armillary.cli.train.launch import HangWatch, launch
    from armillary.cli.train.restarts import Restarts
    from armillary.machine.cores import compute_threads
    from armillary.training.gauge_log import note_failure
    from armillary.training.resilience.watcher import reads_remote

    count = begun.plan.layout.num_devices
    on_cpu = begun.plan.cluster.chip.kind == "cpu" or device == "cpu"
    task = {
        "run": str(run.folder),
        "owner": run.owner,
        "mode": out.mode,
        "device": device,
        "brief": brief,
        "home": {"work": str(begun.home.work), "cache": str(begun.home.cache)},
        "until": f"{until.gauge}={until.value!r}" if until else "",
    }
    job = begun.plan.train
    assert job is not None
    watch = HangWatch(folder=run.folder, on_hang=job.on_hang, say=out.warn, remote_data=reads_remote(begun.plan))
    try:
        ended = launch(
            "armillary.cli.train.rank",
            task,
            num_ranks=count,
            logs=run.folder / "logs",
            threads=compute_threads(count) if on_cpu else None,
            restarts=Restarts(run, job.max_restarts, out.warn),
            watch=watch,
        )
    except BaseException as error:
        note_failure(run, error)
        raise
    if not ended.outcome:
        raise KeyboardInterrupt
    return ended.outcome


def train_joined(
    out: Output,
    home: Home,
    recipe: Recipe,
    planning: dict[str, Any],
    *,
    elastic: bool = False,
    text: str,
    overrides: tuple[str, ...],
    device: str | None,
    until: Until | None,
    **choice: Any,
) -> None:
    """Train as one of the ranks that torchrun or srun started: the main rank prints, and opens the run for all. With
    `elastic`, dp follows the number of ranks."""
    from armillary.parallel.mesh import domains_of_nodes
    from armillary.parallel.world import join_world
    from armillary.training.prepare_run import train_on_ranks

    def find() -> ResolvedRun:
        fitted = fitted_to(shown, home, recipe, world.size) if elastic else recipe
        fills = None if elastic else planning["fills"]
        begun = begin(shown, home, fitted, **{**planning, "devices": world.size, "fills": fills, "domains": domains})
        return replace(begun, recipe=recipe)  # as it was given, so that a run resumes with any number of ranks

    with join_world(device) as world:
        shown, domains = out if world.is_main else Output("silent"), domains_of_nodes(world)
        try:
            done = train_on_ranks(
                world,
                find,
                lambda begun: _open_run(shown, begun, text, overrides, choice)[1],
                lambda plan, run: TrainView(shown, plan, run),
                device=device,
                until=until,
                home=home,
                say=shown.warn,
            )
        except Exception as error:
            said = _as_said(error, rank=world.rank)
            if said is error:
                raise
            raise said from error
    outcome = outcome_of(done)
    say_end(shown, done.run, outcome)
    shown.result(outcome, quiet=outcome["run"])


def _as_said(error: Exception, *, rank: int) -> BaseException:
    """The error a joined rank ends with: the main rank reports an error that all agreed on; a lost connection means
    that another rank reported, or could not report, why it ended. The next rank reports for a main rank that is
    lost."""
    from armillary.cli.train.rank import lost_a_peer
    from armillary.parallel.consensus import AgreedError
    from armillary.parallel.store_barrier import RankLost

    lost = lost_a_peer(error)
    if isinstance(error, RankLost):
        return error if rank == (error.rank == 0) else SystemExit(USER_ERROR)
    if rank and (lost or isinstance(error, AgreedError)):
        return SystemExit(USER_ERROR)
    if lost:
        return ArmillaryError(
            f"another rank ended ({' '.join(str(error).split())[:200]}); see what it said, and train "
            "again: the run continues from the last complete checkpoint"
        )
    return error
