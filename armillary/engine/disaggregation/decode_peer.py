"""One decode server as the prefill side sees it: its connection, its prompts, and how far they may run ahead of it."""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone, Prompt, Welcome
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
    expected_blocks: int
    """of its blocks, those that are not in the queue of the connection yet"""
    stop: int
    """blocks of the prompt"""
    sent: int = 0
    """blocks of the prompt that are queued or not wanted"""
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: bool = False


class DecodePeer:
    """The connection to the first rank of a decode server, which asks for prompts; and their blocks, on all ranks."""

    def __init__(self, side: PrefillSide, sock: socket.socket, hello: Frame) -> None:
        """BadInput or PeerGone where it cannot be served."""
        self._side, self._sock = side, sock
        fingerprint, ranks = wire.read_hello(hello)
        if fingerprint != side.fingerprint:
            raise PeerGone("it serves another model, dtype or block size, or drafts with another head")
        self.key = secrets.token_bytes(16)
        self._links = side.open(self, ranks)
        self._sender = self._links.by_rank[0].sender
        self._lock = threading.Lock()
        """guards what follows"""
        self._waiting: deque[PrefillTask] = deque()
        self._tasks: dict[int, PrefillTask] = {}
        self._unsent_bytes = 0  # of prompts that were started, on the link that carries most
        self._closed = False

    @property
    def block_bytes(self) -> int:
        """Of a block, what the connection carries."""
        return self._links.block_bytes

    @property
    def blocks_at_once(self) -> int:
        return self._links.blocks_at_once

    def run(self) -> None:
        """Read until the connection ends; then its prompts are aborted, which frees their blocks."""
        try:
            wire.send(self._sock, Welcome(self.key, self._side.ranks, self._side.stages, self._sender.offer()).frame())
            self._sock.settimeout(None)
            self._sender.start(self._sock)
            while True:
                self._take(wire.receive(self._sock))
        except PeerGone:
            return
        finally:
            self.close()

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
        else:
            self._sender.take(frame)

    def _start_some(self) -> None:
        """Start prompts in their order while the blocks that are on their way are few."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._closed or not self._waiting:
                    return
                more = self._bytes(self._waiting[0])
                if self._unsent_bytes and self._unsent_bytes + more > self._side.window_bytes // self._num_links:
                    return
                task = self._waiting.popleft()
                self._unsent_bytes += more
            self._side.start(task)

    @property
    def _num_links(self) -> int:
        """About, from all ranks of this server."""
        return len(self._links.by_rank) * self._side.ranks

    def _bytes(self, task: PrefillTask) -> int:
        return task.expected_blocks * self.block_bytes

    def done(self, task: PrefillTask, error: str = "") -> None:
        """All blocks of a prompt are queued, or no more will come."""
        with self._lock:
            self._tasks.pop(task.number, None)
            self._unsent_bytes -= self._bytes(task)
        self._sender.put(Frame(FrameType.DONE, task.number, head=error.encode()))

    def _drop(self, tasks: list[PrefillTask]) -> None:
        for task in tasks:
            task.cancelled = True
            self._side.cancel(task)

    def taken(self, num_bytes: int) -> None:
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
        self._side.forget(self)
        self._drop(tasks)
