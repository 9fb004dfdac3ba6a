"""Restarts of a run's ranks on this machine: which failures are worth one, and how many without a new checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from armillary.store.lease import renew
from armillary.store.run_events import add_event
from armillary.store.runs import Run


@dataclass
class Restarts:
    """`allows(why)` after each failure that another start may mend. At most `most` restarts without a new checkpoint
    between them: a run that gets on may be restarted for ever, one that always fails at the same place may not."""

    run: Run
    most: int
    say: Callable[[str], None] = lambda text: None
    _since: list[int] = field(default_factory=list)  # checkpoints at the last restart
    _count: int = 0

    def state(self) -> dict[str, Any]:
        """For another launcher of the same run."""
        return {"since": self._since, "count": self._count}

    def load(self, state: Mapping[str, Any]) -> None:
        self._since, self._count = list(state["since"]), int(state["count"])

    def allows(self, why: str) -> bool:
        """Whether the ranks are to be started again; says so, and keeps the run for this process meanwhile."""
        steps = self.run.checkpoint_steps()
        self._count = self._count + 1 if steps == self._since or not self._count else 1
        self._since = steps
        if self._count > self.most:
            return False
        renew(self.run.folder, self.run.owner)
        add_event(self.run.folder, "restarting", error=why)
        self.run.update(state="running", error="")
        where = f"checkpoint {steps[-1]:,}" if steps else "the beginning: there is no checkpoint yet"
        self.say(f"{why}; the ranks start again from {where} (restart {self._count} of {self.most})")
        return True
