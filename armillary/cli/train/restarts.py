"""Restarts of a run's ranks on this machine: which failures are worth one, and how many without a new checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    _newest: int = 0  # step of the newest checkpoint, on disk or in memory, at the last restart
    _count: int = 0

    def state(self) -> dict[str, Any]:
        """For another launcher of the same run."""
        return {"newest": self._newest, "count": self._count}

    def load(self, state: Mapping[str, Any]) -> None:
        self._newest, self._count = int(state["newest"]), int(state["count"])

    def allows(self, why: str) -> bool:
        """Whether the ranks are to be started again; says so, and keeps the run for this process meanwhile."""
        from armillary.training.checkpoint.peer_copies import memory_run

        steps, copies = self.run.checkpoint_steps(), memory_run(self.run).checkpoint_steps()
        on_disk, in_memory = max(steps, default=0), max(copies, default=0)
        newest = max(on_disk, in_memory)
        self._count = 1 if newest > self._newest else self._count + 1
        self._newest = newest
        if self._count > self.most:
            return False
        renew(self.run.folder, self.run.owner)
        add_event(self.run.folder, "restarting", error=why)
        self.run.update(state="running", error="")
        where = f"checkpoint {on_disk:,}" if steps else "the beginning: there is no checkpoint yet"
        where = f"step {in_memory:,}, which is in memory" if in_memory > on_disk else where
        self.say(f"{why}; the ranks start again from {where} (restart {self._count} of {self.most})")
        return True
