"""A change of what a service serves, asked for by a file in its folder: rolling, canary, blue/green or shadow.

    rollout.json   {"release": "registry:bot:3", "strategy": "canary", "share": 0.1}

The file stays while the rollout goes on and is replaced by its result, so that a service that was killed continues it.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from armillary.errors import BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store.atomic import write_json

Strategy = Literal["canary", "rolling", "blue-green", "shadow"]
State = Literal["canary", "green", "shadow", "rolling", "done", "rolled back", "shadowed"]
FIRST: dict[Strategy, State] = {"canary": "canary", "blue-green": "green", "shadow": "shadow", "rolling": "rolling"}
NAME = "rollout.json"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout."""

    release: str
    """what is to be served: registry:NAME:VERSION; empty: what the service's recipe names"""
    strategy: Strategy = "canary"
    share: float = 0.1
    """share of requests that canaries get, or that are copied to shadows"""
    replicas: int = 1
    """canaries or shadows; blue-green starts as many as serve now"""
    min_requests: int = 100
    """requests of the new release before it can be promoted; its tests may need more"""
    max_error_fraction: float = 0.01
    """of the new release's requests beyond the share of the others that is found with certainty 1 - MISS"""
    max_slowdown: float = 1.2
    """TTFT and TPOT over those of the others that is found with certainty 1 - MISS"""
    timeout_s: float = 3600.0
    """time for a verdict; then it is rolled back"""
    began: float = field(default_factory=time.time)
    state: State = "canary"
    reason: str = ""
    previous: str = ""
    """what was served before; empty: what the service's recipe names"""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.replicas < 1 or self.min_requests < 1:
            raise BadInput("a rollout needs a share between 0 and 1 and at least one replica and request; correct it")
        if not 0 < self.max_error_fraction < 1 or self.max_slowdown <= 1:
            raise BadInput("a rollout tolerates errors between 0 and 1 and a slowdown above 1; correct it")

    @property
    def goes_on(self) -> bool:
        return self.state in FIRST.values()

    @property
    def is_judged(self) -> bool:
        """Whether the new release is still beside the old one."""
        return self.state in ("canary", "green", "shadow")


def read_rollout(folder: Path) -> Rollout | None:
    """The rollout of a service; None where there was none."""
    path = folder / NAME
    try:
        return build(Rollout, json.loads(path.read_text(encoding="utf-8")), NAME)
    except FileNotFoundError:
        return None
    except ValueError:
        return None  # it is being written by hand


def write_rollout(folder: Path, rollout: Rollout) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NAME, to_plain(rollout))


def replace_rollout(folder: Path, before: Rollout, after: Rollout) -> bool:
    """Write `after` where `before` still stands; False where somebody has asked for something else since."""
    with _alone(folder):
        if read_rollout(folder) != before:
            return False
        write_rollout(folder, after)
        return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The service and whoever asks it for something write one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{NAME}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin_rollout(folder: Path, rollout: Rollout) -> None:
    """Ask for a rollout; BadInput while another goes on."""
    with _alone(folder):
        current = read_rollout(folder)
        if current is not None and current.goes_on:
            raise BadInput(f"the rollout of {current.release} goes on; wait for it, or end it with --roll-back")
        write_rollout(folder, replace(rollout, state=FIRST[rollout.strategy]))


def roll_back(folder: Path) -> None:
    """End a rollout whose release is judged, or begin a rolling update to what was served before one that was carried
    out; BadInput where there is nothing to go back to."""
    with _alone(folder):
        current = read_rollout(folder)
        if current is None or current.state in ("rolled back", "shadowed"):
            raise BadInput("no rollout goes on or was carried out, so there is nothing to roll back")
        if current.is_judged:
            return write_rollout(folder, replace(current, state="rolled back", reason="asked for"))
        back = Rollout(release=current.previous, strategy="rolling", previous=current.release, reason="asked for")
        return write_rollout(folder, replace(back, state="rolling"))
