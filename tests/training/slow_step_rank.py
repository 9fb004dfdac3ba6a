"""A rank whose step 2 is slow at one point, so that SIGTERM finds it there: python -m … RUN_FOLDER POINT SECONDS."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from armillary.spec.plan import Plan
from armillary.store.runs import Run
from armillary.training import loop
from armillary.training.run_lifecycle import RunLifecycle
from armillary.training.step_batches import StepBatches
from armillary.training.trainer import Trainer

STEP = 2


class Slow:
    """Sleeps once, at its point of step 2, and leaves a file that says so."""

    def __init__(self, folder: Path, point: str, seconds: float) -> None:
        self.folder, self.point, self.seconds, self.step = folder, point, seconds, -1

    def at(self, point: str) -> None:
        if (point, self.step) == (self.point, STEP):
            (self.folder / f"slow-{os.environ['RANK']}").touch()
            time.sleep(self.seconds)

    def install(self) -> None:
        self._before(Trainer, "step", lambda step: setattr(self, "step", step))
        self._before(StepBatches, "_rows", lambda step: self.at("data"))
        self._before(Trainer, "loss_sum", lambda batch: self.at("forward"))
        self._before(Trainer, "optimizer_step", lambda *_: self.at("backward"))
        self._before(loop, "_preemption", lambda lifecycle, *_: self._hook(lifecycle, "gradients"))
        self._after_preemption()

    def _hook(self, lifecycle: RunLifecycle, point: str) -> None:
        lifecycle.trainer.optimizer.register_step_pre_hook(lambda *_: self.at(point))

    def _after_preemption(self) -> None:
        """A hook that is registered later runs after the gate: the update has begun."""
        original = loop._preemption

        def patched(lifecycle: RunLifecycle, *args: Any) -> Any:
            made = original(lifecycle, *args)
            self._hook(lifecycle, "update")
            return made

        loop._preemption = patched  # type: ignore[assignment]

    def _before(self, owner: Any, name: str, work: Any) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **more: Any) -> Any:
            work(*(args[1:] if isinstance(owner, type) else args))
            return original(*args, **more)

        setattr(owner, name, patched)


if __name__ == "__main__":
    folder, point, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    run = Run(folder=folder)
    Slow(folder, point, seconds).install()
    loop.train(Plan.from_json(run.plan.read_text()), run, device="cpu", leaving=lambda done: print("left", flush=True))
