"""Runs: one folder per run, named like 2026-11-15-quiet-otter and found by that id or by quiet-otter.

recipe.toml  recipe.json   the recipe, as given and with overrides applied
plan.json                  the prediction
state.json  gauges.jsonl   progress and measurements
events.jsonl               what its time was spent on
lease.json                 the process that owns it
checkpoints/STEP/          to resume from
export/STEP/               Hugging Face folders
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, NotFound, nearest, unknown
from armillary.spec.toml.fields import to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import Taken, staged_folder, write_json, write_text
from armillary.store.gauges import last_record
from armillary.store.home import Home
from armillary.store.lease import (
    HeldLease,
    Lease,
    LeaseLost,
    is_live,
    keeps_beating,
    read_lease,
    take,
    taken_over,
    write_lease,
)
from armillary.store.lock import wait_unlocked
from armillary.store.run_state import RunState
from armillary.store.writer_process import Process

Say = Callable[[str], None]
STOPS_S = 600.0
"""time limit for a process that lost its lease, which finishes its step"""
SILENT_S = 3600.0
"""silence after which a run of an older version on another machine counts as dead"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")
ADJECTIVES = (
    "amber bold brave brief bright brisk calm clear clever crisp deft eager early even fair fleet fond "
    "frank free fresh gentle glad golden good grand green happy hardy honest humble jolly keen kind late light lively "
    "loyal lucid mellow mild modest neat noble patient plain polite proud quick quiet rapid ready rosy royal sage "
    "silent silver steady sunny swift tidy vivid warm wise witty"
)
ANIMALS = (
    "badger bear beaver bison bobcat buffalo camel caribou cat condor crane crow deer dolphin dove eagle egret elk "
    "ferret finch fox gazelle gecko goose hare hawk hedgehog heron hornet ibex ibis jackal jaguar kestrel kiwi "
    "koala lark lemur lion lynx marmot marten mole moose newt ocelot orca otter owl panda pelican pika puffin "
    "raven robin salmon seal sparrow stork swan tiger walrus wolf wren"
)
"""64 × 64 names; an id begins with the date, so a short name rarely occurs twice"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's folder, runs/ID. `owner` is the owner of the lease under which it was opened; empty: read only."""

    folder: Path
    owner: str = field(default="", compare=False, repr=False)

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def name(self) -> str:
        """The id without its date: quiet-otter."""
        return _short(self.id)

    @property
    def state(self) -> RunState:
        """The state, read from the file each time."""
        try:
            state = self._read_state()
        except ArmillaryError as error:
            return RunState(state="unreadable", error=str(error))
        return replace(state, state="died") if state.is_running and not self._is_live(state) else state

    def _is_live(self, state: RunState) -> bool:
        lease = read_lease(self.folder)
        if lease is not None:
            return is_live(self.folder, lease)
        silent_s = time.time() - state.updated  # an older version, without leases: no clock is wrong by hours
        return not state.process.is_gone and (state.host == Process.this().host or silent_s < SILENT_S)

    def _read_state(self) -> RunState:
        path = self.folder / "state.json"
        return RunState.from_json(nan_safe_json.read_table(path), str(path))

    @property
    def progress(self) -> RunState:
        """The state, with step and loss of the last record where a run ended before it stored them."""
        state = self.state
        if state.state not in ("failed", "died"):
            return state
        try:
            last = last_record(self.gauges) or {}
        except ArmillaryError:
            return state
        if last.get("step", -1) < state.step:
            return state
        return replace(state, step=last["step"] + 1, loss=last.get("loss", state.loss))

    def update(self, **changes: Any) -> RunState:
        """Change fields of state.json, which is synced to disk, so at most about once per second. LeaseLost where
        another process has taken the lease over."""
        lease = read_lease(self.folder) if self.owner else None
        if lease is not None and lease.owner != self.owner:
            raise taken_over(self.name, lease)
        state = replace(self._read_state(), **({"updated": time.time()} | changes))
        write_json(self.folder / "state.json", to_plain(state))
        return state

    def is_held_elsewhere(self, say: Say = lambda text: None) -> bool:
        """Whether another process owns it now; a lease of another machine is watched until that is certain."""
        lease = read_lease(self.folder)
        if lease is None:
            state = self.state
            return state.is_running and state.process != Process.this()
        return not lease.is_ours and lease.owner != self.owner and keeps_beating(self.folder, lease, say)

    @property
    def held_text(self) -> str:
        """The owner, as text."""
        lease, state = read_lease(self.folder), self.state
        who = lease.text if lease is not None else f"process {state.pid} on {state.host}"
        return f"run {self.name} is still running ({who})"

    def claim(self, *, take_over: bool = False, say: Say = lambda text: None, **changes: Any) -> Run:
        """Take ownership of the run, to resume it. A stale lease is taken over; a live one only with `take_over`, after
        its owner has stopped."""
        seen, this = read_lease(self.folder), Process.this()
        live = self.is_held_elsewhere(say)
        if live and not take_over:
            raise BadInput(f"{self.held_text}; stop it first")
        claimed = replace(self, owner=take(self.folder, seen).owner)
        if live and seen is not None:
            say(f"waiting for {seen.text} to stop")
            wait_unlocked(self.gauges, STOPS_S, f"{seen.text} does not stop; end it, and train again")
        claimed.update(state="running", error="", pid=this.pid, born=this.born, host=this.host, **changes)
        return claimed

    @contextmanager
    def renewing_lease(self) -> Iterator[HeldLease]:
        """Renew the lease of a run that this process or its parent has opened."""
        lease = read_lease(self.folder)
        if lease is None or not (lease.is_ours or lease.owner == self.owner):
            if self.owner or self.is_held_elsewhere():
                raise LeaseLost(f"{self.held_text}; stop it first")
            lease = take(self.folder, lease)
        with HeldLease(self.folder, lease.owner) as renewed:
            yield renewed

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe with its overrides applied."""
        return dict(nan_safe_json.read_table(self.folder / "recipe.json")["recipe"])

    @property
    def overrides(self) -> list[str]:
        """Its `--set` arguments."""
        return list(nan_safe_json.read_table(self.folder / "recipe.json")["overrides"])

    @property
    def recipe_file(self) -> str:
        """The recipe's file; empty where it is unknown."""
        return str(nan_safe_json.read_table(self.folder / "recipe.json").get("file", ""))

    def write_recipe(
        self, recipe: Mapping[str, Any], *, text: str = "", overrides: Sequence[str] = (), file: str = ""
    ) -> None:
        """Replace the recipe, for a run that resumes with a changed one."""
        _write_recipe(self.folder, recipe, text, overrides, file)

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    def write_plan(self, plan: object) -> None:
        """Replace plan.json, for a run that resumes on another machine."""
        write_json(self.plan, to_plain(plan))

    @property
    def gauges(self) -> Path:
        return self.folder / "gauges.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / str(step)

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return _steps(self.folder / "checkpoints")

    def export(self, step: int) -> Path:
        return self.folder / "export" / str(step)

    def latest_export(self) -> Path | None:
        """The newest Hugging Face folder, or None before the first."""
        done = [step for step in _steps(self.folder / "export") if (self.export(step) / "config.json").is_file()]
        return self.export(done[-1]) if done else None


def create_run(
    home: Home,
    recipe: Mapping[str, Any],
    *,
    text: str = "",
    overrides: Sequence[str] = (),
    plan: object = None,
    model: str = "",
    steps: int | None = None,
    name: str = "",
    file: str = "",
    taken: Collection[str] = (),
) -> Run:
    """Create a run folder atomically: recipe (with `text`, the file as given, and `file`, its path), plan (a Plan or
    its table) and state. Without `name` it gets a new one, which is not `taken` elsewhere."""
    if name:
        check_name(name)
    lease = Lease.new()
    while True:
        names = {*taken, *(_short(path.name) for path in _folders(home))}
        folder = home.runs / f"{time.strftime('%Y-%m-%d')}-{name or new_name(names)}"
        try:
            with staged_folder(folder) as partial:
                _write_recipe(partial, recipe, text, overrides, file)
                _fill(partial, plan, RunState.new(model=model, steps=steps))
                write_lease(partial, lease)
            return Run(folder=folder, owner=lease.owner)
        except Taken:
            if name:
                raise
            continue  # another process chose the same name at the same time


def check_name(name: str) -> None:
    """Refuse what is no name for a run."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"'{name}' is no name for a run; use letters, digits and - like quiet-otter")


def new_name(taken: Collection[str]) -> str:
    """A name that is not taken, with a number where the words run out.

    From the system's randomness: jobs with the same seed of Python's generator must not choose the same name.
    """
    number = 1
    while True:
        for _ in range(64):
            name = f"{secrets.choice(ADJECTIVES.split())}-{secrets.choice(ANIMALS.split())}"
            name = name if number == 1 else f"{name}-{number}"
            if name not in taken:
                return name
        number += 1


def _write_recipe(folder: Path, recipe: Mapping[str, Any], text: str, overrides: Sequence[str], file: str) -> None:
    table = {"overrides": list(overrides), "recipe": to_plain(recipe)}
    write_json(folder / "recipe.json", table | ({"file": file} if file else {}))
    if text:
        write_text(folder / "recipe.toml", text)


def _fill(folder: Path, plan: object, state: RunState) -> None:
    write_json(folder / "state.json", to_plain(state))
    if plan is not None:
        write_json(folder / "plan.json", to_plain(plan))
    for name in ("checkpoints", "export"):
        (folder / name).mkdir()


def list_runs(home: Home) -> list[Run]:
    """Every run, newest first."""
    runs = [Run(folder=folder) for folder in _folders(home)]
    return sorted(runs, key=lambda run: (run.state.started, run.id), reverse=True)


def find_run(home: Home, name: str) -> Run:
    """A run by id, by short name (the newest wins) or by the path of its folder."""
    path = Path(os.path.expanduser(name))
    if is_run_folder(path):
        return Run(folder=path.absolute())
    runs = list_runs(home)
    for run in runs:
        if name in (run.id, run.name):
            return run
    if not runs:
        raise NotFound(f"no run '{name}': there is none in {home.runs} yet; armillary train starts one")
    names = run_names(runs)
    options = names if nearest(name, names) else [run.name for run in runs]
    raise unknown("run", name, options, where=f"armillary runs lists {len(runs)}")


def run_names(runs: Sequence[Run]) -> list[str]:
    """The names and ids that find_run accepts."""
    return [name for run in runs for name in (run.name, run.id)]


def is_run_folder(path: Path) -> bool:
    # os.path returns False where Path would raise, as for a name that is too long
    return all(os.path.isfile(path / name) for name in ("state.json", "recipe.json"))


def _folders(home: Home) -> list[Path]:
    if not home.runs.is_dir():
        return []
    return [path for path in home.runs.iterdir() if not path.name.startswith(".") and is_run_folder(path)]


def _short(run_id: str) -> str:
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d-(.+)", run_id)
    return dated.group(1) if dated else run_id


def _steps(folder: Path) -> list[int]:
    """Numbered subfolders in order; incomplete ones have hidden names."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
