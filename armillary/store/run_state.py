"""RunState: how far a run has come, as kept in its state.json.

The file is replaced atomically, so it can be read at any moment; a run that was killed still says "running" in it, and
is told from a living one by its lease (lease.py): `Run.state` then says "died".
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
    """How far a run has come."""

    state: Status = "running"
    """as the run itself last wrote it"""
    model: str = ""
    """name of the model it trains"""
    step: int = 0
    """steps done"""
    steps: int | None = None
    """steps planned"""
    loss: float | None = None
    """training loss of the last step"""
    error: str = ""
    """why it failed"""
    started: float = 0.0
    """unix seconds"""
    updated: float = 0.0
    """unix seconds of the last change"""
    host: str = ""
    """machine that runs it"""
    pid: int = 0
    """process that runs it"""
    born: int = 0
    """when that process started, see Process"""

    @classmethod
    def new(cls, *, model: str = "", steps: int | None = None) -> RunState:
        """Of a run that this process starts now."""
        now, me = time.time(), Process.this()
        return cls(model=model, steps=steps, started=now, updated=now, host=me.host, pid=me.pid, born=me.born)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> RunState:
        """Fields that a later version may have added are passed over."""
        known = {field.name for field in fields(cls)}
        return build(cls, {key: value for key, value in values.items() if key in known}, where)

    @property
    def shown(self) -> str:
        """What to tell people: "died" is a run whose process is gone without a word."""
        return self.state

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def process(self) -> Process:
        """The one that wrote this."""
        return Process(pid=self.pid, born=self.born, host=self.host)
