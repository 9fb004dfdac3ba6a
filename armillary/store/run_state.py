"""The state of a run, as stored in its state.json.

The file is replaced atomically, so that it can be read at any time. A killed run still has "running" in it; its lease
(lease.py) shows that it is dead, and `Run.state` is then "died".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from armillary.spec.toml.fields import build
from armillary.store.writer_process import Process

Status = Literal["running", "finished", "interrupted", "failed", "died", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state and progress of a run; times are in unix seconds."""

    state: Status = "running"
    model: str = ""
    step: int = 0  # completed steps
    steps: int | None = None  # planned steps
    loss: float | None = None  # of the last step
    error: str = ""  # why it failed
    started: float = 0.0
    updated: float = 0.0
    host: str = ""  # host, pid and born are those of its process, see Process
    pid: int = 0
    born: int = 0

    @classmethod
    def new(cls, *, model: str = "", steps: int | None = None) -> RunState:
        """The state of a run that this process starts."""
        now, this = time.time(), Process.this()
        return cls(model=model, steps=steps, started=now, updated=now, host=this.host, pid=this.pid, born=this.born)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> RunState:
        """From a table of state.json; fields of later versions are ignored."""
        known = {field.name for field in fields(cls)}
        return build(cls, {key: value for key, value in values.items() if key in known}, where)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def step_text(self, between: str = "/") -> str:
        """'60/100', or '60' where no number of steps is planned, as in a server's run."""
        return f"{self.step:,}" + (f"{between}{self.steps:,}" if self.steps else "")

    @property
    def process(self) -> Process:
        """The process that wrote this state."""
        return Process(pid=self.pid, born=self.born, host=self.host)
