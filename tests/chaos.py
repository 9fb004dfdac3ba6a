"""Chaos: train in ranks of its own while an outside process kills them at random, and compare what is left.

    python -m tests.chaos PID SEED KILLS GAP_S      kills ranks of launcher PID, at gaps drawn uniformly up to GAP_S

The killer knows nothing of the run: it may strike imports, rendezvous, loads, steps or saves.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from armillary.store import nan_safe_json
from armillary.store.home import Home
from armillary.store.runs import find_run

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Round:
    """How a run under fire ended: `kills` are (seconds since its ranks started, rank, signal)."""

    code: int
    out: str
    err: str
    kills: list[tuple[float, int, int]] = field(default_factory=list)


def train_under_fire(
    recipe: Path, home: Home, name: str, *, ranks: int = 4, seed: int, kills: int, gap_s: float
) -> Round:
    """`armillary train RECIPE --run NAME`, whose ranks are killed `kills` times."""
    line = [sys.executable, "-m", "armillary", "train", str(recipe), "--run", name, "--home", str(home.work)]
    line += ["--devices", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    killer = [sys.executable, "-m", "tests.chaos", *map(str, (child.pid, seed, kills, gap_s))]
    striking = subprocess.Popen(killer, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = child.communicate(timeout=600)
        struck, _ = striking.communicate(timeout=60)
    finally:
        child.kill()
        striking.kill()
    rows = [tuple(nan_safe_json.loads(line)) for line in struck.splitlines()]
    return Round(code=child.returncode, out=out, err=err, kills=rows)


def weights_digest(home: Home, name: str) -> str:
    """Of the exported weights of a run, bit for bit."""
    folder = find_run(home, name).latest_export()
    assert folder is not None, f"run {name} has not finished"
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# --- the killer


def kill_at_random(launcher: int, seed: int, kills: int, gap_s: float) -> None:
    """The first gap begins when there are ranks."""
    draw = random.Random(seed)
    _wait_for_ranks(launcher)
    begin = time.monotonic()
    for _ in range(kills):
        time.sleep(draw.uniform(0, gap_s))
        ranks = _wait_for_ranks(launcher)
        if not ranks:
            return
        number = draw.randrange(len(ranks))
        try:
            os.kill(ranks[number], signal.SIGKILL)
        except ProcessLookupError:
            continue
        print(nan_safe_json.dumps([round(time.monotonic() - begin, 3), number, int(signal.SIGKILL)]), flush=True)


def _wait_for_ranks(launcher: int) -> list[int]:
    """None where the launcher has ended."""
    while not (ranks := children(launcher)) and _is_alive(launcher):
        time.sleep(0.01)
    return ranks


def children(pid: int) -> list[int]:
    """Ranks of a launcher that are alive, in order."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, line = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        state, parent = status.rpartition(")")[2].split()[:2]
        if int(parent) == pid and state != "Z" and b"armillary.cli.train.rank" in line:
            found.append(int(folder.name))
    return sorted(found)


def _is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    kill_at_random(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
