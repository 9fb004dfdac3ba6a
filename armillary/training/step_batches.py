"""Step batches: the batch of each step, returned once every rank has its rows and knows the number of all targets.

The same all-reduce carries requests to stop, ranks that cannot read their rows, and the decision to save a checkpoint,
so that all ranks stop or fail before the same step and save after the same step. On a GPU it runs for the next step
while the device works on the current one.
"""

import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

import torch

from armillary.parallel.consensus import Consensus, attempt
from armillary.parallel.mesh import Mesh
from armillary.spec.plan import Plan
from armillary.training.data.batch import BatchSource
from armillary.training.data.loader import DeviceBatch, Loader

_EXTRA_STEPS = 1000
"""steps that can be read after the last one, as a profile does"""
Stop = Callable[[], bool]
Due = Literal["", "checkpoint", "copy"]
DUE: tuple[Due, ...] = get_args(Due)


class StepBatch(NamedTuple):
    """A batch that all ranks are ready for: the number of targets is that of all ranks, `stop` whether any was asked
    to stop before this step, `wait_s` how long the step waited for its rows, `save` whether the main rank wants a
    checkpoint after it and `copy` whether a copy in memory. `consensus_s` is how long this rank waited for the others
    in the all-reduce, `work_s` each rank's time for its last step without waits for others (0: not known)."""

    step: int
    rows: DeviceBatch
    num_targets: float
    stop: bool
    wait_s: float
    save: bool
    consensus_s: float = 0.0
    work_s: tuple[float, ...] = ()
    copy: bool = False
    data_s: tuple[float, ...] = ()  # how long each rank waited for its rows of the step that `work_s` is of
    checksum: float = 0.0  # of the rows of all ranks


class StepBatches:
    """`at(step)` returns a batch, `prefetch(step)` prepares the next one; both are called by every rank."""

    def __init__(
        self, source: BatchSource, plan: Plan, mesh: Mesh, ranks: Consensus, *, work_s: Callable[[], float]
    ) -> None:
        """`work_s()` is this rank's time for its last step, which the other ranks compare with theirs."""
        assert plan.train is not None and plan.data is not None
        self._source, self._mesh, self._ranks, self._work_s = source, mesh, ranks, work_s
        self._steps, self._workers = plan.train.steps, plan.data.workers
        self._device = mesh.world.device
        self._loader: Loader | None = None
        self._next = self._until = 0
        self._prefetched: StepBatch | None = None
        self._last_wait_s = 0.0
        self.left_out: set[int] = set()
        self.save_due: Callable[[int], Due] = lambda step: ""
        """whether a checkpoint follows a step, or a copy in memory; called once per step, and only the main rank's
        result counts"""
        self.check: Callable[[], None] = lambda: None
        """raises what went wrong beside the steps, as in a checkpoint that is being written; every rank then raises"""

    def data_step(self, step: int) -> int:
        """The number of the batch that a step reads: the same, but for batches that are left out."""
        for skipped in sorted(self.left_out):
            step += skipped <= step
        return step

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Batches that no later step reads."""
        self.left_out |= set(numbers)
        self.close()

    def at(self, step: int, stop: Stop) -> StepBatch:
        ready, self._prefetched = self._prefetched, None
        return ready if ready is not None and ready.step == step else self._fetch(step, stop)

    def prefetch(self, step: int, stop: Stop) -> None:
        """While the device works: a wait that ends before the device does costs nothing. On a CPU nothing
        overlaps the wait, so it belongs to the step that reads the rows."""
        if step >= self._steps or self._device.type != "cuda":
            return
        launched = torch.cuda.Event()
        launched.record()
        batch = self._fetch(step, stop)
        self._prefetched = batch if launched.query() else batch._replace(wait_s=0.0)

    def _fetch(self, step: int, stop: Stop) -> StepBatch:
        rows, error = attempt(lambda: self._checked_rows(step))
        begin = time.perf_counter()
        several = self._ranks.size > 1
        size, rank = self._ranks.size, self._ranks.rank
        times = [0.0] * 2 * size if several else []
        if several:
            times[rank], times[size + rank] = self._work_s(), self._last_wait_s
        save = DUE.index(self.save_due(step)) if self._ranks.is_main else 0
        flags = float(stop()), float(error is not None), float(save)
        counts = (float(rows.num_targets), float(rows.checksum)) if rows is not None else (0.0, 0.0)
        targets, checksum, stops, errors, saves, *all_times = self._ranks.total(*counts, *flags, *times)
        consensus_s = time.perf_counter() - begin if several else 0.0
        if errors:
            self._ranks.raise_first(error)
        assert rows is not None and self._loader is not None
        same = self._ranks.size // self._mesh.dp_size  # ranks of tp, cp and pp read the same rows
        wait_s = self._last_wait_s = self._loader.wait_s
        request = DUE[round(saves)]
        return StepBatch(
            step,
            rows,
            targets / same,
            stops > 0,
            wait_s,
            request == "checkpoint",
            consensus_s,
            tuple(all_times[:size]),
            request == "copy",
            tuple(all_times[size:]),
            checksum / same,
        )

    def _checked_rows(self, step: int) -> DeviceBatch:
        self.check()
        return self._rows(self.data_step(step))

    def _rows(self, step: int) -> DeviceBatch:
        """This rank's rows; a step out of order opens the loader again."""
        if self._loader is None or self._next != step or step >= self._until:
            self.close()
            self._until = self._steps if step < self._steps else step + _EXTRA_STEPS
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
        """Close the loader; the next `at` opens it again."""
        loader, self._loader, self._prefetched = self._loader, None, None
        if loader is not None:
            loader.__exit__(None, None, None)
