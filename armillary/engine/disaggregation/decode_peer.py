"""One decode server as the prefill side sees it: its connection, its prompts, and how far they may run ahead of it."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import Payload
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone, Prompt
from armillary.engine.request.sequence import Sequence

if TYPE_CHECKING:
    from armillary.engine.disaggregation.prefill_side import PrefillSide


@dataclass(eq=False)
class PrefillTask:
    """One prompt that a decode server asked for."""

    peer: DecodePeer
    number: int
    prompt: Prompt
    request_id: str
    expected_bytes: int
    """of its blocks that are not in the queue of the connection yet"""
    stop: int
    """blocks of the prompt"""
    sent: int = 0
    """blocks of the prompt that are queued or not wanted"""
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: bool = False


class DecodePeer:
    """The connection to one decode server: a thread that reads, and one that sends."""

    def __init__(self, side: PrefillSide, sock: socket.socket) -> None:
        self._side, self._sock = side, sock
        self._slots = side.slots()
        self._shared_bytes: dict[int, int] = {}  # of slots that the other side has not read yet
        self._queue: queue.SimpleQueue[tuple[Frame, Payload | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """guards what follows"""
        self._waiting: deque[PrefillTask] = deque()
        self._tasks: dict[int, PrefillTask] = {}
        self._unsent_bytes = 0  # of prompts that were started
        self._closed = False

    def run(self) -> None:
        """Read until the connection ends; then its prompts are aborted, which frees their blocks."""
        try:
            self._greet()
            self._sock.settimeout(None)
            threading.Thread(target=self._send, name="kv-send", daemon=True).start()
            while True:
                self._take(wire.receive(self._sock))
        except PeerGone:
            return
        finally:
            self.close()

    def _greet(self) -> None:
        self._sock.settimeout(wire.SILENCE_S)
        wire.prepare(self._sock)
        hello, own = wire.receive(self._sock), self._side.fingerprint
        if hello.kind is not FrameType.HELLO or hello.entries or hello.number != wire.VERSION:
            wire.send(self._sock, Frame(FrameType.REFUSAL, head=b"it is of another version"))
            raise PeerGone("another version")
        if bytes(hello.head) != own:
            wire.send(self._sock, Frame(FrameType.REFUSAL, head=b"it serves another model, dtype or block size"))
            raise PeerGone("another model")
        wire.send(self._sock, wire.hello(b"" if self._slots is None else self._slots.offer()))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameType.REQUEST:
            task = self._side.make_task(self, frame.number, Prompt.read(frame))
            with self._lock:
                self._waiting.append(task)
                self._tasks[task.number] = task
            self._start_some()
        elif frame.kind is FrameType.CANCEL:
            with self._lock:
                cancelled = self._tasks.pop(frame.number, None)
            if cancelled is not None:
                self._drop([cancelled])
                self._start_some()
        elif self._slots is not None and frame.kind is FrameType.SHARE:
            self._slots.accepted()
        elif self._slots is not None and frame.kind is FrameType.FREE:
            if frame.number not in self._shared_bytes:
                raise PeerGone("it gave back memory that it did not have")
            size = self._shared_bytes.pop(frame.number)
            self._slots.give_back(frame.number)
            self._taken(size)

    def shared_slot(self) -> tuple[int, Tensor] | None:
        """Memory that the other side sees; None where there is none, or none left: then the connection carries them."""
        return None if self._slots is None else self._slots.take()

    def _start_some(self) -> None:
        """Start prompts in their order while the blocks that are on their way are few."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._closed or not self._waiting:
                    return
                more = self._waiting[0].expected_bytes
                if self._unsent_bytes and self._unsent_bytes + more > self._side.window_bytes:
                    return
                task = self._waiting.popleft()
                self._unsent_bytes += more
            self._side.start(task)

    def put(self, task: PrefillTask, frame: Frame, payload: Payload | None, num_bytes: int) -> None:
        """Queue blocks of a prompt. In the engine's thread."""
        task.expected_bytes -= num_bytes
        self._queue.put((frame, payload))

    def done(self, task: PrefillTask, error: str = "") -> None:
        """All blocks of a prompt are queued, or no more will come."""
        with self._lock:
            self._tasks.pop(task.number, None)
            self._unsent_bytes -= task.expected_bytes
        self._queue.put((Frame(FrameType.DONE, task.number, head=error.encode()), None))

    def _drop(self, tasks: list[PrefillTask]) -> None:
        for task in tasks:
            task.cancelled = True
            self._side.cancel(task)

    def _send(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=1.0)
                except queue.Empty:
                    item = Frame(FrameType.ALIVE), None
                if item is None:
                    return
                self._send_one(*item)
        except PeerGone as error:
            print(f"a decode server is gone: {error}", file=sys.stderr, flush=True)
            self.close()

    def _send_one(self, frame: Frame, payload: Payload | None) -> None:
        data = payload.data() if payload is not None else memoryview(b"")
        begin = time.monotonic()
        if payload is not None and payload.slot is not None:
            self._shared_bytes[payload.slot] = len(data)
            head = wire.SLOT.pack(payload.slot, len(data)) + bytes(frame.head)
            wire.send(self._sock, frame._replace(kind=FrameType.SHARED_BLOCKS, head=head))
            return self._side.sent(len(data), time.monotonic() - begin)
        wire.send(self._sock, frame._replace(payload=data))
        self._side.sent(len(data), time.monotonic() - begin)
        if payload is not None:
            payload.release()
        self._taken(len(data))

    def _taken(self, num_bytes: int) -> None:
        """The other side has so many bytes of blocks, or they are in its connection."""
        with self._lock:
            self._unsent_bytes -= num_bytes
        self._start_some()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tasks, self._tasks = list(self._tasks.values()), {}
            self._waiting.clear()
        wire.close(self._sock)
        if self._slots is not None:
            self._slots.close()
        self._queue.put(None)
        self._drop(tasks)
        self._side.forget(self)
