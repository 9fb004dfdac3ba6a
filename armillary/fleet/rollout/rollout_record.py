"""A change of what a service serves, asked for by a file in its folder: rolling, or by a canary that is judged first.

    rollout.json   {"release": "registry:bot:3", "canary_fraction": 0.1}

The file stays while the rollout goes on and is replaced by its result, so that a service that was killed continues it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from armillary.errors import BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store.atomic import write_json

State = Literal["canary", "rolling", "done", "rolled back"]
NAME = "rollout.json"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout."""

    release: str
    """what is to be served: registry:NAME:VERSION"""
    canary_fraction: float = 0.1
    """share of requests that canaries get; 0: no canary, the rollout begins at once"""
    canary_replicas: int = 1
    min_requests: int = 100
    """requests of the canaries before they are judged"""
    max_error_fraction: float = 0.01
    """of the canaries' requests beyond the share of the others"""
    max_slowdown: float = 1.2
    """canaries' TTFT and ITL p50 over those of the others"""
    timeout_s: float = 3600.0
    """time for the canaries; then they are rolled back"""
    began: float = field(default_factory=time.time)
    state: State = "canary"
    reason: str = ""
    previous: str = ""
    """what was served before; empty: the service's own"""

    def __post_init__(self) -> None:
        if not 0 <= self.canary_fraction < 1 or self.canary_replicas < 1 or self.min_requests < 1:
            raise BadInput(
                "a rollout needs canary_fraction from 0 to 1 and at least one replica and request; correct it"
            )

    @property
    def goes_on(self) -> bool:
        return self.state in ("canary", "rolling")


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


def begin_rollout(folder: Path, rollout: Rollout) -> None:
    """Ask for a rollout; BadInput while another goes on."""
    current = read_rollout(folder)
    if current is not None and current.goes_on:
        raise BadInput(f"the rollout of {current.release} goes on; wait for it, or roll it back first")
    write_rollout(folder, replace(rollout, state="canary" if rollout.canary_fraction else "rolling"))
