"""Feed: the batches of a run, each given out once every rank has its rows and knows how many targets all have.

The same small exchange carries a request to stop, word of a rank that cannot read, and the wish for a checkpoint, so
that all stop or fail before the same step and save after the same one. With a GPU it is done for the next step while
the device works on the present one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from armillary.parallel.consensus import Agreement, attempt
from armillary.parallel.exposed_waits import Waits
from armillary.parallel.mesh import Mesh
from armillary.spec.plan import Plan
from armillary.training.data.batch import BatchSource
from armillary.training.data.loader import DeviceBatch, Loader

_BEYOND = 1000
"""steps read ahead for callers that go on after the last one, as a profile does"""
Stop = Callable[[], bool]


class Fetched(NamedTuple):
    """A batch that all ranks are ready for."""

    step: int
    batch: DeviceBatch
    targets: float
    """of all ranks"""
    stop: bool
    """whether any rank was asked to stop before this step"""
    wait_s: float
    """how long the step had to wait for its rows"""
    save: bool
    """whether the main rank wants a checkpoint after this step"""


class Feed:
    """`at(step)` gives a batch, `look_ahead(step)` sees to the next one; both are called by every rank."""

    def __init__(self, source: BatchSource, plan: Plan, mesh: Mesh, ranks: Agreement, waits: Waits) -> None:
        assert plan.train is not None and plan.data is not None
        self._source, self._mesh, self._ranks, self._waits = source, mesh, ranks, waits
        self._steps, self._workers = plan.train.steps, plan.data.workers
        self._device = mesh.world.device
        self._loader: Loader | None = None
        self._next = self._until = 0
        self._ahead: Fetched | None = None
        self.own_s = 0.0
        """this rank's own work in its last step, told to the others with the next exchange; 0: not known"""
        self.each_s: tuple[float, ...] = ()
        """what all ranks told"""
        self.due: Callable[[int], bool] = lambda step: False
        """whether a checkpoint follows a step; asked once a step, and only the main rank's answer counts"""

    def at(self, step: int, stop: Stop) -> Fetched:
        ready, self._ahead = self._ahead, None
        return ready if ready is not None and ready.step == step else self._fetch(step, stop)

    def look_ahead(self, step: int, stop: Stop) -> None:
        """While the device works: a wait that ends before the device does costs nothing. A processor that computes by
        itself has nothing to wait beside, and its wait belongs to the step that reads the rows."""
        if step >= self._steps or self._device.type != "cuda":
            return
        launched = torch.cuda.Event()
        launched.record()
        fetched = self._fetch(step, stop)
        self._ahead = fetched if launched.query() else fetched._replace(wait_s=0.0)

    def _fetch(self, step: int, stop: Stop) -> Fetched:
        batch, error = attempt(lambda: self._rows(step))
        begin = time.perf_counter()
        each = float(batch.num_targets if batch is not None else 0)
        many = self._ranks.size > 1
        mine = [self.own_s if rank == self._ranks.rank else 0.0 for rank in range(self._ranks.size)] if many else []
        save = self._ranks.is_main and self.due(step)
        flags = float(stop()), float(error is not None), float(save)
        targets, stops, errors, saves, *told = self._ranks.total(each, *flags, *mine)
        self.each_s = tuple(told)
        if many:
            self._waits.add(time.perf_counter() - begin)
        if errors:
            self._ranks.raise_first(error)
        assert batch is not None and self._loader is not None
        same = self._ranks.size / self._mesh.dp_size  # those of tp, cp and pp read the same rows
        return Fetched(step, batch, targets / same, stops > 0, self._loader.wait_s, saves > 0)

    def _rows(self, step: int) -> DeviceBatch:
        """This rank's rows; steps asked out of order open the reader anew."""
        if self._loader is None or self._next != step or step >= self._until:
            self.close()
            self._until = self._steps if step < self._steps else step + _BEYOND
            loader = Loader(
                self._source,
                device=self._device,
                rank=self._mesh.dp_rank,
                world=self._mesh.dp_size,
                workers=self._workers,
                start=step,
                stop=self._until,
            )
            self._loader = loader.__enter__()
        self._next = step + 1
        return self._loader.at(step)

    def close(self) -> None:
        """Let go of what reads ahead; asked again, it opens again."""
        loader, self._loader, self._ahead = self._loader, None, None
        if loader is not None:
            loader.__exit__(None, None, None)
