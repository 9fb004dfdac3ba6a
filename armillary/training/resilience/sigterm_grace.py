"""Preemption: SIGTERM is answered within `train.grace_s`, also where a step takes longer than that.

A thread of its own sees the signal, or that another rank has seen it. A step that ends within a third of the time is
completed, and the run stops after it as usual. Otherwise the step is abandoned: until the optimizer changes them,
weights and states are those of the last complete step, so all ranks save them from this thread, over a process group of
their own, whatever the main threads wait for. Where any rank has begun its update all complete the step: gradients and
their norm are then on every rank, and no rank waits for another any more.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.parallel.host_memory import Event, computed
from armillary.training.step.numerics import random_state

COMPLETE_SHARE = 1 / 3
"""of the grace period, for the step to end by itself; the rest is for saving"""
UNWIND_S = 2.0
"""for the main thread to end by itself once all is saved"""
POLL_S = 0.2


class StepAbandoned(Exception):
    """The step was not completed: the state before it is saved, and the run ends."""


class UpdateGate:
    """What the main thread passes before the optimizer changes anything, and the thread of the signal may close."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._changed = threading.Condition()
        self._step: int | None = None  # that can still be abandoned
        self._closed = self._abandoned = False
        self.random: dict[str, Tensor] = {}  # random state before the step
        self.ready: Event = None  # after which the device has the state before the step

    def start_step(self, step: int) -> None:
        with self._changed:
            self._step, self.random, self.ready = step, random_state(), computed(self._device)

    def before_update(self) -> None:
        """Waits while it is closed; StepAbandoned where the step is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed or self._abandoned)
            if self._abandoned:
                raise StepAbandoned
            self._step = None

    def end_step(self) -> None:
        with self._changed:
            self._step = None

    def close(self) -> int | None:
        """The step that cannot be completed from now on; None where there is none, or its update has begun."""
        with self._changed:
            self._closed = self._step is not None
            return self._step

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


class NoPreemption:
    """Of a run without a grace period: steps are always completed."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        yield

    @contextmanager
    def after_step(self, num_steps: int) -> Iterator[None]:
        yield

    def was_abandoned(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Preemption(NoPreemption):
    """`with Preemption(…) as preemption: …` around the steps; `is_saved` once a step was abandoned."""

    def __init__(
        self,
        ranks: Consensus,
        gate: UpdateGate,
        *,
        grace_s: float,
        save: Callable[[int, dict[str, Tensor]], None],
        before_exit: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
        token: str = "",
    ) -> None:
        """`ranks` have a process group of their own. `save(step, random)` saves what was complete before step number
        `step`; every rank calls it. `before_exit()` is called before a process ends whose main thread does not."""
        self._say = say
        self._ranks, self._gate, self._grace_s, self._save, self._before_exit = ranks, gate, grace_s, save, before_exit
        self._store: Any = dist.distributed_c10d._get_default_store() if ranks.size > 1 else None
        self._key = f"preemption/{token}"
        self._ended = threading.Event()
        self._reads, self._writes = os.pipe()
        self._before: int | None = None
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._answers, self._answered = threading.Event(), threading.Event()
        self.is_saved = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around each step."""
        self._gate.start_step(step)
        yield
        self._gate.end_step()

    @contextmanager
    def after_step(self, num_steps: int) -> Iterator[None]:
        """Around what follows `num_steps` steps, may take long and changes no state, as validation."""
        self._gate.start_step(num_steps)
        yield
        self._gate.before_update()

    def was_abandoned(self) -> bool:
        """Whether a step failed because it was abandoned: this rank at its gate, or a peer that has left since."""
        if self._answers.is_set():
            self._answered.wait(self._grace_s)
        return self.is_saved

    def __enter__(self) -> Self:
        os.set_blocking(self._writes, False)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._thread.join(self._grace_s)
        if not self._thread.is_alive():
            os.close(self._reads)
            os.close(self._writes)

    # --- in the thread

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the store is gone, and with it the run
            while not self._ended.is_set():
                if self._is_asked():
                    return self._answer(time.monotonic())

    def _is_asked(self) -> bool:
        """Whether this rank or another one was signalled; takes up to half a second."""
        ready, _, _ = select.select([self._reads], [], [], 0.5)
        if ready and signal.SIGTERM in os.read(self._reads, 64):
            if self._store is not None:
                self._store.set(f"{self._key}/asked", "")
            return True
        return self._store is not None and bool(self._store.check([f"{self._key}/asked"]))

    def _answer(self, begin: float) -> None:
        try:
            step = self._abandoned_step()
            if step is None:
                return
            self._answers.set()
            self._save(step, self._gate.random)
            self.is_saved = True
        except Exception as error:
            self._gate.open()  # the run stops after the step, and says what is wrong
            if not isinstance(error, ArmillaryError):
                self._say(f"the step could not be abandoned ({error!r}); the run stops after it")
            return
        finally:
            self._answered.set()
        self._gate.abandon()
        self._leave(self._grace_s - (time.monotonic() - begin))

    def _abandoned_step(self) -> int | None:
        """The step that no rank can complete any more; None where the run ends by itself."""
        self._ended.wait(COMPLETE_SHARE * self._grace_s)
        attempt = 0
        while not self._ended.is_set():
            if (step := self._close_all(attempt)) is not None:
                return None if self._ended.is_set() else step
            attempt += 1
            self._ended.wait(POLL_S)
        return None

    def _leave(self, left_s: float) -> None:
        """End the process where the main thread does not, as in a collective."""
        if self._ended.wait(min(UNWIND_S, max(0.5, left_s - 1.0))):
            return
        try:
            self._before_exit()
        finally:
            os._exit(0)

    def _close_all(self, attempt: int) -> int | None:
        """The step that no rank can complete any more; None where one may."""
        step = self._gate.close()
        agreed = step if self._store is None else self._agree(attempt, step)
        if agreed is None:
            self._gate.open()
        return agreed

    def _agree(self, attempt: int, step: int | None) -> int | None:
        """The main rank decides, from what all ranks say."""
        key = f"{self._key}/{attempt}"
        self._store.set(f"{key}/{self._ranks.rank}", str(step))
        if self._ranks.is_main:
            said = {self._take(f"{key}/{rank}", self._grace_s / 5) for rank in range(self._ranks.size)}
            self._store.set(f"{key}/all", said.pop() if len(said) == 1 else "None")
        agreed = self._take(f"{key}/all", self._grace_s)
        return int(agreed) if agreed.isdigit() else None

    def _take(self, key: str, wait_s: float) -> str:
        """The value of a key, or 'None' where it does not come; polls, as others use the store meanwhile."""
        end = time.monotonic() + wait_s
        while not self._store.check([key]):
            if time.monotonic() > end:
                return "None"
            time.sleep(0.02)
        value: str = self._store.get(key).decode()
        return value
