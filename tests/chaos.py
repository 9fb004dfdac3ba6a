"""Chaos: train in ranks of their own while an outside process (attacker.py) strikes at random, and compare what is left
with the uninterrupted run.

Every scenario ends with the weights of the run, bit for bit, and with what it had to notice.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError
from armillary.store.home import Home
from armillary.store.run_events import RunEvent, read_events
from armillary.store.runs import Run, find_run
from tests.attacker import FILLER
from tests.fork_server import Command, environment

DISK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What the attacker did, and what it met."""

    time: float
    rank: int
    action: str
    saving: bool
    phase: str = "starting"  # what the run was doing


@dataclass(frozen=True, kw_only=True)
class Round:
    """How a training under attack ended."""

    run: str
    home: Home
    code: int
    out: str
    err: str
    strikes: list[Strike] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return find_run(self.home, self.run).folder

    @property
    def restarts(self) -> int:
        return self.err.count("the ranks start again from")


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """A recipe, where it is trained, and what starts the command line: `ForkServer.start`, or `start_process`."""

    recipe: Path
    home: Home
    start: Callable[[Sequence[str], Path], Command]
    ranks: int = 4

    def train(
        self, run: str, *overrides: str, action: str = "", seed: int = 0, count: int = 1, gap_s: float = 0.0
    ) -> Round:
        """`armillary train RECIPE --run NAME`, attacked where an action is given."""
        training = self.begin(run, *overrides)
        attacker = self._attacker(action, training.pid, seed, count, gap_s) if action else None
        try:
            code = training.wait()
        finally:
            struck = _strikes(attacker)
        events = read_events(find_run(self.home, run).folder) if _exists(self.home, run) else []
        struck = [replace(strike, phase=_phase(strike, events)) for strike in struck]
        return Round(run=run, home=self.home, code=code, out=training.out, err=training.err, strikes=struck)

    def begin(self, run: str, *overrides: str) -> Command:
        args = ["train", str(self.recipe), "--run", run, "--home", str(self.home.work), "--devices", str(self.ranks)]
        args += [part for text in overrides for part in ("--set", text)]
        self.home.work.mkdir(parents=True, exist_ok=True)
        return self.start(args, self.home.work / f"{run}.log")

    def _attacker(self, *args: Any) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tests.attacker", *map(str, (*args, self.home.work))]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment({}))


def _strikes(attacker: subprocess.Popen[str] | None) -> list[Strike]:
    """It ends with the launcher; a gap that it sleeps through is of no use to anybody."""
    if attacker is None:
        return []
    try:
        out, _ = attacker.communicate(timeout=2)
    except subprocess.TimeoutExpired:
        attacker.kill()
        out, _ = attacker.communicate()
    return [Strike(**json.loads(line)) for line in out.splitlines()]


def weights_digest(home: Home, name: str) -> str:
    """Of the exported weights of a run, bit for bit."""
    folder = find_run(home, name).latest_export()
    assert folder is not None, f"run {name} has not finished"
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# --- scenarios: each is a run that ends well, or an AssertionError


def killed(chaos: Chaos, run: str, *, seed: int, count: int, gap_s: float) -> list[Round]:
    """Ranks are killed one after the other; every death is noticed, and all ranks start again."""
    done = chaos.train(run, action="kill", seed=seed, count=count, gap_s=gap_s)
    assert done.code == 0, done.err
    assert done.restarts <= len(done.strikes), (done.strikes, done.err)
    return [done]


def stopped(chaos: Chaos, run: str, *, seed: int, count: int, gap_s: float) -> list[Round]:
    """A rank is stopped; the verdict names it, and all ranks start again."""
    done = chaos.train(run, "train.on_hang=restart", action="stop", seed=seed, gap_s=gap_s)
    assert done.code == 0, done.err
    assert not done.strikes or "is stopped (SIGSTOP)" in done.err, (done.strikes, done.err)
    return [done]


def flipped(chaos: Chaos, run: str, *, seed: int, count: int, gap_s: float) -> list[Round]:
    """All processes are killed, again until there is a checkpoint, and a bit of the newest one flips: it is set aside
    and named."""
    rounds: list[Round] = []
    damaged = None
    while damaged is None and len(rounds) < 10 and not (rounds and rounds[-1].code == 0):
        rounds.append(chaos.train(run, action="power", seed=seed + 1000 * len(rounds), gap_s=gap_s))
        damaged = flip_a_bit(find_run(chaos.home, run), seed) if rounds[-1].code and _exists(chaos.home, run) else None
    done = chaos.train(run) if rounds[-1].code else rounds[-1]
    assert done.code == 0, done.err
    if damaged is not None:
        assert f"checkpoint {damaged} of run {run} is damaged" in done.err, (damaged, done.err)
    return [*rounds, done]


def filled(chaos: Chaos, run: str, *, seed: int, count: int, gap_s: float) -> list[Round]:
    """The disk fills up: one line says so, no checkpoint is lost, and the run goes on once there is space again."""
    with small_disk(chaos.home.work) as home:
        there = replace(chaos, home=home)
        first = there.train(run, action="fill", seed=seed, gap_s=gap_s)
        before = find_run(home, run).checkpoint_steps() if _exists(home, run) else []
        assert first.code in (0, 2), first.err
        assert first.code == 0 or "disk full" in first.err or "No space left" in first.err, first.err
        assert "Traceback" not in first.err, first.err
        (home.work / FILLER).unlink(missing_ok=True)
        done = there.train(run) if first.code else first
        assert done.code == 0 and "is damaged" not in done.err, done.err
        assert not before or first.code == 0 or f"from step {before[-1]:,}" in done.out, (before, done.out)
        chaos.home.runs.mkdir(parents=True, exist_ok=True)
        shutil.copytree(done.folder, chaos.home.runs / done.folder.name)
    return [replace(first, home=chaos.home), replace(done, home=chaos.home)]


def unreliable(chaos: Chaos, run: str, *, seed: int, count: int, gap_s: float) -> list[Round]:
    """Every third write to the store fails, and then the machine is lost: another one goes on from the store."""
    url = f"train.checkpoint_url=unreliable://{chaos.home.work / 'store'}"
    lost = replace(chaos, home=Home.at(chaos.home.work / f"lost-{run}"))
    first = lost.train(run, url, action="power", seed=seed, gap_s=gap_s)
    shutil.rmtree(lost.home.work, ignore_errors=True)  # a process may be ending just now
    done = chaos.train(run, url)
    assert done.code == 0 and "on the local disk only" not in first.err + done.err, done.err
    stored = sorted(int(path.parent.name) for path in (chaos.home.work / "store" / run).glob("*/manifest.json"))
    assert stored and stored[-1] == find_run(chaos.home, run).checkpoint_steps()[-1], stored
    return [replace(done, strikes=first.strikes)]


SCENARIOS = {"kill": killed, "stop": stopped, "flip": flipped, "fill": filled, "store": unreliable}


def _exists(home: Home, run: str) -> bool:
    try:
        return bool(find_run(home, run))
    except ArmillaryError:
        return False


def flip_a_bit(run: Run, seed: int) -> int | None:
    """One bit of one file of the newest checkpoint; returns its step, or None where there is none."""
    steps, draw = run.checkpoint_steps(), random.Random(seed)
    if not steps:
        return None
    path = draw.choice(sorted(run.checkpoint(steps[-1]).iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return steps[-1]


def unreliable_store(folder: Path) -> Path:
    """A folder for PYTHONPATH with which fsspec knows unreliable:// in every process."""
    facts = folder / "unreliable_store-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: unreliable-store\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[fsspec.specs]\nunreliable = tests.unreliable_store:UnreliableFileSystem\n"
    )
    return folder


@contextmanager
def small_disk(folder: Path) -> Iterator[Home]:
    """A file system of its own where this user may mount one, else a folder (see attacker.py)."""
    place = folder / "disk"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
    mounted = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield Home.at(place)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(place)


# --- what a round cost


def steps_lost(folder: Path) -> list[int]:
    """Per failure: how many steps further the run had been, as far as its events tell, than where it went on."""
    lost, last, failed = [], 0, False
    for event in read_events(folder):
        if event.event == "steps":
            step = int(event.number("step"))
            if failed:
                lost.append(max(0, last - step))
            last, failed = step, False
        elif event.event in ("restarting", "resumed"):
            failed = True
    return lost


def _phase(strike: Strike, events: Sequence[RunEvent]) -> str:
    before = [event for event in events if event.time <= strike.time]
    if not before:
        return "starting"
    return "saving" if strike.saving and before[-1].event == "steps" else str(before[-1].event)
