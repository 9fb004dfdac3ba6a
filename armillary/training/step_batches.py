"""Step batches: the batch of each step, returned once every rank has its rows and knows the number of all targets.

The same all-reduce carries requests to stop, ranks that cannot read their rows, and the decision to save a checkpoint,
so that all ranks stop or fail before the same step and save after the same step. On a GPU it runs for the next step
while the device works on the current one. On more than MANY_RANKS it is called for several steps at once, whose rows
are then read ahead.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus, attempt
from armillary.parallel.mesh import Mesh
from armillary.spec.plan import Plan
from armillary.training.data.batch import BatchSource
from armillary.training.data.loader import AHEAD, DeviceBatch, Loader

_EXTRA_STEPS = 1000
"""steps that can be read after the last one, as a profile does"""
MANY_RANKS = 64
"""above which ranks agree on several steps at once: an all-reduce through the hosts takes longer the more there are"""
AT_ONCE, AT_ONCE_S = 8, 10.0
"""the most steps, and about the most seconds, that a request to stop waits then; two steps where each is long"""
Stop = Callable[[], bool]
Due = Literal["", "checkpoint", "copy"]
DUE: tuple[Due, ...] = get_args(Due)
_WIDTH, _ERRORS = 4, 2
"""values of a step that are summed, and the place of ranks without rows among them"""


class StepBatch(NamedTuple):
    """A batch that all ranks are ready for: the number of targets is that of all ranks, `stop` whether any was asked
    to stop before this step, `wait_s` how long the step waited for its rows, `save` whether the main rank wants a
    checkpoint after it and `copy` whether a copy in memory. `consensus_s` is how long this rank waited for the others
    in the all-reduce, `work_s` each rank's time for its last step without waits for others (0: not known), or the mean
    of the steps since ranks agreed last; empty for a step that they agreed on before."""

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
        self._at_once = 1  # steps that the next all-reduce is for; the same on every rank
        self._agreed: dict[int, StepBatch] = {}
        self._read: dict[int, DeviceBatch] = {}  # rows that were read before all ranks had theirs, by number
        self._due: dict[int, Due] = {}
        self._times: list[tuple[float, float]] = []  # work and wait of the steps since the last all-reduce
        self._agreed_at, self._is_stopping = 0.0, False
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
        """A step that ranks have agreed on already, or the first of those that they agree on now."""
        self._times.append((self._work_s(), self._last_wait_s))
        if step in self._agreed:
            self._is_stopping = self._is_stopping or stop()
        else:
            self._agree(step, stop)
        self._due.pop(step, None)
        batch = self._agreed.pop(step)
        self._last_wait_s = batch.wait_s
        return batch

    def _agree(self, first: int, stop: Stop) -> None:
        steps = range(first, first + 1 if first >= self._steps else min(first + self._at_once, self._steps))
        rows, error, wait_s = self._read_rows(steps)
        begin, size = time.perf_counter(), self._ranks.size
        mean_s = self._since_agreed(begin) if self._ranks.is_main else 0.0
        own = [value for step in steps for value in self._of_step(step, rows.get(step))]
        stopping = float(self._is_stopping or stop())
        stops, step_s, *sums = self._ranks.total(stopping, mean_s, *own, *self._own_times())
        self._agreed_at, self._is_stopping = time.perf_counter(), False
        if sums[_ERRORS]:
            self._ranks.raise_first(error)
        self._agreed = self._complete(rows, sums[: len(own)])
        self._read = {self.data_step(step): unused for step, unused in rows.items() if step not in self._agreed}
        self._agreed[first] = self._agreed[first]._replace(
            stop=stops > 0,
            wait_s=wait_s,
            consensus_s=self._agreed_at - begin if size > 1 else 0.0,
            work_s=tuple(sums[len(own) :][:size]),
            data_s=tuple(sums[len(own) :][size:]),
        )
        if size > MANY_RANKS and step_s:
            self._at_once = max(2, min(AT_ONCE, int(AT_ONCE_S / step_s)))

    def _read_rows(self, steps: range) -> tuple[dict[int, DeviceBatch], ArmillaryError | None, float]:
        """This rank's rows by step, up to what it cannot read, and how long they were waited for."""
        rows, before, wait_s = dict[int, DeviceBatch](), self._read, 0.0
        _, error = attempt(self.check)
        for step in steps if error is None else ():
            number = self.data_step(step)
            if number in before:
                rows[step] = before[number]
                continue
            read, error = attempt(partial(self._rows, number))
            if read is None:
                break
            assert self._loader is not None
            rows[step], wait_s = read, wait_s + self._loader.wait_s
        return rows, error, wait_s

    def _of_step(self, step: int, rows: DeviceBatch | None) -> tuple[float, float, float, float]:
        """What is summed over all ranks: targets, checksum, whether the rows cannot be read, and what is saved."""
        if self._ranks.is_main and step not in self._due:
            self._due[step] = self.save_due(step)
        save = float(DUE.index(self._due.get(step, "")))
        return (0.0, 0.0, 1.0, save) if rows is None else (float(rows.num_targets), float(rows.checksum), 0.0, save)

    def _complete(self, rows: Mapping[int, DeviceBatch], sums: Sequence[float]) -> dict[int, StepBatch]:
        """The steps before the first that some rank has no rows for; that rank tries once more before that step."""
        same = self._ranks.size // self._mesh.dp_size  # ranks of tp, cp and pp read the same rows
        batches = {}
        for number, step in enumerate(rows):
            targets, checksum, errors, saves = sums[number * _WIDTH : (number + 1) * _WIDTH]
            if errors:
                break
            request = DUE[round(saves)]
            batches[step] = StepBatch(
                step,
                rows[step],
                targets / same,
                stop=False,
                wait_s=0.0,
                save=request == "checkpoint",
                copy=request == "copy",
                checksum=checksum / same,
            )
        return batches

    def _own_times(self) -> list[float]:
        """Work and wait of this rank in its own places, zeros in those of the others."""
        times, self._times = self._times, []
        size, rank = self._ranks.size, self._ranks.rank
        if size == 1:
            return []
        known = [work_s for work_s, _ in times if work_s > 0]
        values = [0.0] * 2 * size
        values[rank] = sum(known) / len(known) if known else 0.0
        values[size + rank] = sum(wait_s for _, wait_s in times) / len(times)
        return values

    def _since_agreed(self, now: float) -> float:
        """Seconds per step since the last all-reduce; 0 before there was one."""
        return (now - self._agreed_at) / len(self._times) if self._agreed_at else 0.0

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
                ahead=AT_ONCE if self._ranks.size > MANY_RANKS else AHEAD,
            )
            self._loader = loader.__enter__()
        self._next = step + 1
        return self._loader.at(step)

    def close(self) -> None:
        """Close the loader; the next `at` opens it again."""
        loader, self._loader, self._prefetched = self._loader, None, None
        self._agreed, self._read = {}, {}
        if loader is not None:
            loader.__exit__(None, None, None)
