"""An engine in a thread of its own: any thread or event loop submits and aborts requests and gets deltas as they come.

Requests are checked and hashed in the caller's thread; the engine's thread only reads an inbox between steps.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import FrameType
from typing import Protocol

from armillary.engine.engine import Engine, gc_frozen
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import BadInput

Deliver = Callable[[OutputDelta], None]
_IDLE_S = 0.5  # longest sleep of an idle engine between two signs of life


class Outbox(Protocol):
    """Receives the deltas of all requests together. Called in the engine's thread."""

    def take(self, deltas: list[OutputDelta]) -> None:
        """Deltas of a step, or of sequences that ended between steps."""

    def flush(self) -> None:
        """An iteration of the loop is over, also one without deltas."""


class EngineThread:
    """The thread, its inbox, and the receivers of deltas."""

    def __init__(self, engine: Engine, outbox: Outbox | None = None) -> None:
        """With an `outbox`, deltas of requests without a receiver of their own go there, of all requests together."""
        self.engine = engine
        self._outbox = outbox
        self.failure: BaseException | None = None  # the exception that ended the thread
        self._clock = engine.loop.clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}
        self._lock = threading.Lock()
        """guards the check that the thread still reads its inbox, and putting something there"""
        self._stopping = self._closed = False
        self._last_iteration = self._clock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> EngineThread:
        """Start the thread; from now on outputs are streamed."""
        self.engine.scheduler.stream()
        self._thread.start()
        return self

    def submit(
        self, request: Request, deliver: Deliver | None = None, constraint: MakeConstraint | None = None
    ) -> list[Sequence]:
        """Queue a request; `deliver` gets its deltas, in the engine's thread. BadInput where it cannot be served; a
        full queue or a duplicate id gives a delta with finish = error. Its sequences are for the engine's thread."""
        arrived_s = self._clock()
        sequences = self.engine.scheduler.request_table.prepare(request, constraint)
        with self._lock:
            if self._stopping or self._closed:
                raise BadInput("the engine is stopping; ask another one")
            self._inbox.put(lambda: self._enter(sequences, deliver, arrived_s))
        return sequences

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request: its last deltas say so. With an `index`, only end that completion."""
        if index is None:
            self._inbox.put(lambda: self._send(self.engine.abort(request_id)))
        else:
            self._inbox.put(lambda: self._complete(request_id, index))

    def between_steps(self, work: Callable[[], None]) -> None:
        """Have the thread do something between two steps; `work` raises nothing."""
        self._inbox.put(work)

    def join(self) -> None:
        self._thread.join()

    async def stream(self, request: Request, constraint: MakeConstraint | None = None) -> AsyncIterator[OutputDelta]:
        """Deltas of a request as they come. Leaving the loop early aborts it."""
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[OutputDelta]()
        self.submit(request, lambda delta: _hand_over(loop, deltas, delta), constraint)
        left = request.params.n
        try:
            while left:
                delta = await deltas.get()
                left -= delta.finish is not None
                yield delta
        finally:
            if left:
                self.abort(request.id)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, serve the rest for up to `drain_s`, abort what is left, and end the thread."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(drain_s)
        if self._thread.is_alive():
            self._inbox.put(self._abort_all)
            self._thread.join()

    def quiet_s(self) -> float:
        """Time since the thread's last iteration: a health check that a hung step or a dead thread cannot pass."""
        return self._clock() - self._last_iteration

    def frame(self) -> FrameType | None:
        """The thread's current frame; none: it has ended."""
        return sys._current_frames().get(self._thread.ident or 0)

    # --- in the thread

    def _run(self) -> None:
        try:
            with gc_frozen():
                while not self._should_end():
                    self._last_iteration = self._clock()
                    self._read(self._wait_s())
                    if self.engine.busy:
                        self._send(self.engine.step())
                    if self.engine.transfer is not None:
                        self.engine.transfer.after_step()
                    if self._outbox is not None:
                        self._outbox.flush()
        except BaseException as failure:
            self.failure = failure
            with self._lock:
                self._closed = True
            self._read(0.0)
            self._fail_all(f"the engine failed ({type(failure).__name__}: {failure}); restart it")
            raise

    def _should_end(self) -> bool:
        with self._lock:
            self._closed = self._stopping and not self.engine.busy and self._inbox.empty()
            return self._closed

    def _wait_s(self) -> float:
        """How long to wait for the inbox; 0 where there is work."""
        scheduler, now = self.engine.scheduler, self._clock()
        wake = now if scheduler.under_way or self._stopping else scheduler.request_table.wake_at(now)
        return _IDLE_S if wake is None else min(_IDLE_S, max(0.0, wake - now))

    def _read(self, wait_s: float) -> None:
        """Run what is in the inbox, after waiting for it up to `wait_s`."""
        try:
            if wait_s > 0:
                self._inbox.get(timeout=wait_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _enter(self, sequences: list[Sequence], deliver: Deliver | None, arrived_s: float) -> None:
        """Queue a request that has waited since `arrived_s` for the step under way to end."""
        transfer = self.engine.transfer
        waits = transfer is not None and transfer.wants(sequences[0])
        try:
            self.engine.scheduler.request_table.enter(sequences, arrived_s, awaits_blocks=waits)
        except BadInput as error:
            deltas = [
                OutputDelta(sequence=seq, tokens=(), text="", finish="error", error=str(error)) for seq in sequences
            ]
            if deliver is not None:
                for delta in deltas:
                    deliver(delta)
            elif self._outbox is not None:
                self._outbox.take(deltas)
            return
        if transfer is not None and waits:
            transfer.ask(sequences[0])
        if deliver is not None:
            self._deliver[sequences[0].request.id] = deliver

    def _complete(self, request_id: str, index: int) -> None:
        """The receiver has seen the end of this completion (a stop string)."""
        for seq in self.engine.scheduler.request_table.requests.get(request_id, ()):
            if seq.index == index and seq.finish is None:
                self.engine.scheduler.finish(seq, "stop", self._clock())
                return self._send(self.engine.end([seq]))

    def _send(self, deltas: list[OutputDelta]) -> None:
        if self._outbox is not None:
            own = [delta for delta in deltas if delta.sequence.request.id in self._deliver] if self._deliver else []
            self._outbox.take([delta for delta in deltas if delta not in own] if own else deltas)
            deltas = own
        for delta in deltas:
            self._deliver[delta.sequence.request.id](delta)
        for name in {delta.sequence.request.id for delta in deltas if delta.finish is not None}:
            if name not in self.engine.scheduler.request_table.requests:
                del self._deliver[name]

    def _abort_all(self) -> None:
        for name in list(self.engine.scheduler.request_table.requests):
            self._send(self.engine.abort(name))

    def _fail_all(self, error: str) -> None:
        for name, sequences in self.engine.scheduler.request_table.requests.items():
            for seq in (seq for seq in sequences if seq.finish is None and name in self._deliver):
                self._deliver[name](OutputDelta(sequence=seq, tokens=(), text="", finish="error", error=error))


def _hand_over(loop: asyncio.AbstractEventLoop, deltas: asyncio.Queue[OutputDelta], delta: OutputDelta) -> None:
    with suppress(RuntimeError):  # the client is gone and its event loop closed
        loop.call_soon_threadsafe(deltas.put_nowait, delta)
