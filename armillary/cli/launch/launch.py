"""`armillary launch`: start a recipe's training on this machine, on hosts, or on a scheduler; jobs, logs, cancel."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.launch.job_state import follow, job_facts, progress_text, state_of
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import VerbGroup, set_option
from armillary.errors import BadInput, BadLayout, MissingPart
from armillary.spec.recipe import Recipe, load_recipe, to_dict, to_toml
from armillary.store.home import Home
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.cluster.job import Job
    from armillary.cluster.node_request import Nodes
    from armillary.spec.network_domains import Domain
    from armillary.spec.tables.launch_target import TargetName

TARGET_NAMES = ("local", "ssh", "slurm", "kubernetes", "ray")


class LaunchGroup(VerbGroup):
    """`launch RECIPE` is short for `launch start RECIPE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help") and args[0] not in self.commands and not ctx.resilient_parsing:
            args = ["start", *args]
        return super().parse_args(ctx, args)


launch = LaunchGroup(
    "launch",
    help="Start a recipe's training on one node or many.\n\n"
    "`armillary launch RECIPE --on local|ssh|slurm|kubernetes|ray` submits a job and returns; "
    "`jobs`, `logs` and `cancel` follow it.",
)


@launch.verb
@click.argument("recipe", type=click.Path(path_type=Path))
@set_option
@click.option("--on", "target", type=click.Choice(TARGET_NAMES), help="Where.  [default: the recipe's launch.on]")
@click.option(
    "--nodes", metavar="N|MIN:MAX", help="Use N nodes, dp fills their devices; or let MIN to MAX come and go."
)
@click.option("--run", "name", metavar="NAME", help="Resume this run, or begin one of this name.")
@click.option("--dry-run", is_flag=True, help="Show the plan and what would be submitted; write nothing.")
@click.option("--check", "is_check", is_flag=True, help="Measure the nodes and their links instead; name outliers.")
@click.option("--interactive", is_flag=True, help="Slurm: open a shell on the nodes. Else: stay and show the log.")
def start(
    out: Output,
    home: Home,
    recipe: Path,
    overrides: tuple[str, ...],
    target: str | None,
    nodes: str | None,
    name: str | None,
    dry_run: bool,
    is_check: bool,
    interactive: bool,
) -> None:
    """Plan RECIPE, and start its training as a job.

    [hardware] states the devices, [launch] how they are asked for. The job runs in this folder, which all nodes must
    share; it is named after its run, saves when it is told to stop, and resumes when it is started again.

    --check starts the same ranks for a minute to measure every device, disk and link; exit code 1 where one is an
    outlier. What it measures between nodes is used by later plans. With --run NAME, the job of that name is then
    started without its outliers (ssh, slurm).

    --nodes 3:4 (local, ssh, slurm) starts up to four nodes; when one is lost or comes back, the run goes on from its
    newest checkpoint with as many as there are, from three on.
    """
    from armillary.cluster.job import RECIPE
    from armillary.cluster.node_request import make_job, parse_range
    from armillary.cluster.targets import TARGETS

    least, most = parse_range(nodes) if nodes is not None else (0, None)
    where, asked, placed = _ask(out, home, recipe, overrides, target, most, look=not dry_run)
    if name and not is_check:
        asked = _leave_out(out, home, asked, where, name)
    job = make_job(asked, placed, home, target=where, name=name or "", least=least, is_check=is_check)
    text = to_toml(asked)
    files = {RECIPE: text, **TARGETS[job.target].files(job, text)}
    _warn_shared(out, job)
    if dry_run:
        return _show(out, job, placed, files)
    _refuse_live(job)
    if is_check:
        from armillary.cli.launch.check import check_nodes

        return check_nodes(out, home, job, asked, files)
    _submit(out, job, placed, files, interactive=interactive)


def _ask(
    out: Output,
    home: Home,
    file: Path,
    overrides: tuple[str, ...],
    target: str | None,
    nodes: int | None,
    *,
    look: bool,
) -> tuple[TargetName, Recipe, Nodes]:
    """The recipe for its nodes, after its plan was shown; a layout that does not fit is refused. The target is asked
    for the domains of its network where we may `look`."""
    from armillary.cli.plan.options import find_cluster
    from armillary.cluster.node_request import fill_nodes, nodes_of, with_nodes

    recipe = load_recipe(file, overrides)
    if nodes is not None:
        recipe = with_nodes(recipe, nodes)
        recipe = fill_nodes(recipe, find_cluster(recipe))
    placed = nodes_of(recipe, find_cluster(recipe))
    where: Any = target or recipe.launch.on
    _say_plan(out, home, recipe, _domains(where, recipe, placed.count) if look else ())
    return where, recipe, placed


def _leave_out(out: Output, home: Home, recipe: Recipe, target: TargetName, name: str) -> Recipe:
    """The recipe without the nodes that a check of this job named."""
    from armillary.cluster.excluded_nodes import excluded_nodes, without_nodes

    nodes = excluded_nodes(home, name, target)
    launch = without_nodes(recipe.launch, target, nodes) if nodes else None
    if launch is None:
        return recipe
    out.say(f"leaving out {', '.join(nodes)}, as its check said; launch --check --run {name} measures them again")
    return replace(recipe, launch=launch)


def _domains(target: TargetName, recipe: Recipe, count: int) -> tuple[Domain, ...]:
    """Of as many nodes as the target's scheduler would choose; none where it has too few, or does not know."""
    from armillary.cluster.targets import TARGETS
    from armillary.spec.network_domains import packed

    known = TARGETS[target].domains(recipe.launch) if count > 1 else {}
    return packed(list(known.values()), count) if len(known) >= count else ()


def _warn_shared(out: Output, job: Job) -> None:
    if job.target == "local" and job.num_nodes > 1:
        out.warn(
            f"{job.num_nodes} nodes on one machine share its cores, so the plan is not for them; use it to try a start"
        )


def _say_plan(out: Output, home: Home, recipe: Recipe, domains: tuple[Domain, ...]) -> None:
    from armillary.cli.plan.plan import priced
    from armillary.cli.plan.plan_text import say_training
    from armillary.planning.training.training_plan import training_plan

    names = ("model", "on", "sequence", "batch_tokens", "lora")
    asked = {"recipe": to_dict(recipe), "overrides": (), "domains": domains, **dict.fromkeys(names)}
    problem, prediction, how = priced(out, home, asked)
    planned = training_plan(problem, prediction)
    say_training(out, planned, how)
    if not planned.fits:
        raise BadLayout(f"{planned.shortage}; {planned.remedy.replace('--on ', '--set hardware.on=')}")


def _show(out: Output, job: Job, placed: Nodes, files: dict[str, str]) -> None:
    out.say(f"\njob {job.name} on {job.target}, {placed.text}; nothing was written or submitted")
    for file, text in files.items():
        out.say(f"\n--- {path_text(job.folder / file)}\n{text.rstrip()}")
    answer = {"job": job.name, "on": job.target, "nodes": placed.count, "ranks_per_node": placed.ranks, "files": files}
    out.result(answer, quiet=[text for file, text in files.items() if file != "recipe.toml"])


def _refuse_live(job: Job) -> None:
    """A job of this name that still runs."""
    from armillary.cluster.job import FILE, read_job
    from armillary.cluster.targets import TARGETS

    if not (job.folder / FILE).is_file():
        return
    before = read_job(job.folder)
    if before.handle and TARGETS[before.target].state(before).is_live:
        raise BadInput(
            f"job {job.name} is still there; stop it with armillary launch cancel {job.name}, or name another --run"
        )


def _submit(out: Output, job: Job, placed: Nodes, files: dict[str, str], *, interactive: bool) -> None:
    from armillary.cluster.job import note_handle, write_job
    from armillary.cluster.targets import TARGETS

    if interactive and job.target == "slurm":
        return _open_shell(out, job, placed, files)
    write_job(job, files)
    job = note_handle(job, TARGETS[job.target].submit(job))
    number = f" ({job.handle})" if job.handle != job.name else ""
    out.say(f"job {job.name}{number} on {job.target}, {placed.text}")
    if interactive:
        _stay(out, job)
    else:
        out.say(f"follow: armillary launch logs {job.name} --follow\nstop:   armillary launch cancel {job.name}")
    out.result(job_facts(job), quiet=job.name)


def _open_shell(out: Output, job: Job, placed: Nodes, files: dict[str, str]) -> None:
    """Becomes salloc: the allocation ends with its shell."""
    from armillary.cluster import slurm
    from armillary.cluster.job import write_job

    if shutil.which("salloc") is None:
        raise MissingPart(
            "salloc is not installed here; log in to a machine of the Slurm cluster, or choose another --on"
        )
    write_job(job, files)
    out.say(f"allocating {placed.text}; in the shell, bash {path_text(job.folder / slurm.SCRIPT)} starts the ranks")
    os.execvp("salloc", slurm.allocation(job))


def _stay(out: Output, job: Job) -> None:
    """Show the log until the job is over; Ctrl-C asks it to save and end."""
    try:
        follow(out, job)
    except KeyboardInterrupt:
        from armillary.cluster.targets import TARGETS

        out.say(f"asking job {job.name} to save and end")
        TARGETS[job.target].cancel(job)
        follow(out, job)


@launch.verb
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def measure(out: Output, home: Home, recipe: Path, file: Path) -> None:
    """One rank of a check, as `launch --check` starts it: writes FILE."""
    from armillary.cli.launch.check import measure_rank

    measure_rank(load_recipe(recipe), file)


measure.hidden = True


# --- jobs


@launch.verb
def jobs(out: Output, home: Home) -> None:
    """The jobs that were started from here, newest first, with their state and the step of their run."""
    from armillary.cluster.job import list_jobs

    rows = [job_facts(job, state_of(job), progress_text(home, job)) for job in list_jobs(home)]
    if rows:
        columns = ["job", "on", "id", "nodes", "ranks", "state", "step", "started", "where"]
        out.table("", columns, [_row(facts) for facts in rows])
    else:
        out.say("no jobs here; armillary launch RECIPE starts one")
    out.result(rows, quiet=[f"{facts['job']} {facts['state']}" for facts in rows])


def _row(facts: dict[str, Any]) -> list[object]:
    state = f"{facts['state']} ({facts['detail']})" if facts["detail"] else facts["state"]
    number = facts["id"] if facts["id"] != facts["job"] else ""
    ago = f"{seconds_text(max(0.0, time.time() - facts['created']))} ago"
    return [
        facts["job"],
        facts["on"],
        number,
        facts["nodes"],
        facts["ranks"],
        state,
        facts["step"],
        ago,
        facts["where"],
    ]


@launch.verb
@click.argument("name", metavar="JOB", shell_complete=completion.jobs)
@click.option("--node", type=int, metavar="K", help="Only this node.")
@click.option("-f", "--follow", "stay", is_flag=True, help="Show what is printed as it arrives, until the job is over.")
def logs(out: Output, home: Home, name: str, node: int | None, stay: bool) -> None:
    """What the nodes of a job printed."""
    from armillary.cluster.job import find_job
    from armillary.cluster.log_files import log_lines
    from armillary.cluster.targets import TARGETS

    job = find_job(home, name)
    if stay:
        follow(out, job, node)
        return out.result({"job": job.name, "state": state_of(job).state})
    TARGETS[job.target].fetch_logs(job)
    lines = list(log_lines(job, node=node))
    for line in lines:
        out.say(line)
    if not lines:
        out.say(f"job {job.name} has printed nothing yet")
    out.result(lines, quiet=lines)


@launch.verb
@click.argument("name", metavar="JOB", shell_complete=completion.jobs)
def cancel(out: Output, home: Home, name: str) -> None:
    """Ask a job to save and end; started again with --run JOB, it resumes."""
    from armillary.cluster.job import find_job
    from armillary.cluster.targets import TARGETS

    job = find_job(home, name)
    before = state_of(job)
    if before.state in ("finished", "stopped", "failed", "cancelled"):
        raise BadInput(f"job {job.name} has ended ({before.state}); armillary launch logs {job.name} shows how")
    TARGETS[job.target].cancel(job)
    out.say(f"job {job.name} was asked to save and end; armillary launch jobs shows when it has")
    out.result({"job": job.name, "state": state_of(job).state}, quiet=job.name)
