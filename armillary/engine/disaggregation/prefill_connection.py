"""The decode side's connection to a prefill server: made again whenever it ends, and read by a thread that hands what
comes to the engine's thread.

Blocks come in frames of the connection, or, from a server on the same host, in memory that both share.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.shared_memory import SharedFrames
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone
from armillary.engine.engine_thread import EngineThread
from armillary.errors import BadInput

Outgoing = queue.SimpleQueue[Frame | None]
_STAGED_FRAMES = 4
"""frames of blocks that were read and are not in the cache yet; beyond, the connection is not read"""
_RETRY_S = 1.0


class Arrivals(Protocol):
    """What takes what comes, in the engine's thread."""

    def opened(self, outgoing: Outgoing) -> None:
        """There is a connection: `outgoing` is sent."""

    def take(
        self, number: int, entries: list[tuple[int, int]], payload: memoryview, give_back: Callable[[], None]
    ) -> None:
        """Blocks of a request; `give_back` when they were read."""

    def done(self, number: int, failed: bool) -> None:
        """No more blocks of a request will come."""

    def lost(self) -> None:
        """The connection has ended."""


class Staged:
    """Memory for blocks that were read and are not in the cache yet. It is used again: to get new memory takes as long
    as to fill it."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(_STAGED_FRAMES):
            self._free.put(bytearray())

    def memory(self, size: int) -> memoryview:
        """Waits until the engine has taken earlier blocks."""
        memory = self._free.get()
        return memoryview(memory if len(memory) >= size else bytearray(size))[:size]

    def give_back(self, view: memoryview) -> None:
        assert isinstance(view.obj, bytearray)
        self._free.put(view.obj)


class PrefillConnection:
    """One at a time, to one address."""

    def __init__(
        self, worker: EngineThread, arrivals: Arrivals, *, address: str, fingerprint: bytes, block_bytes: int
    ) -> None:
        self._worker, self._arrivals = worker, arrivals
        self._address, self._fingerprint, self._block_bytes = address, fingerprint, block_bytes
        self._stopped = threading.Event()
        self._sock: socket.socket | None = None
        self._said = ""

    def connect(self) -> None:
        """Connect, and again whenever the connection ends. BadInput where the prefill server refuses; one that does not
        answer may come later."""
        connected: tuple[socket.socket, bytes] | None = None
        try:
            connected = self._connected()
        except PeerGone as error:
            self._say(str(error))
        threading.Thread(target=self._run, args=(connected,), name="kv-receive", daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        if self._sock is not None:
            wire.close(self._sock)

    def _connected(self) -> tuple[socket.socket, bytes]:
        """(connection, what the server says of memory to share)"""
        try:
            sock = socket.create_connection(wire.parse_address(self._address), timeout=wire.SILENCE_S)
        except OSError as error:
            raise PeerGone(f"no prefill server at {self._address} ({error.strerror or error})") from None
        try:
            wire.prepare(sock)
            wire.send(sock, wire.hello(self._fingerprint))
            answer = wire.receive(sock)
        except PeerGone:
            sock.close()
            raise
        if answer.kind is not FrameType.HELLO:
            sock.close()
            why = bytes(answer.head).decode(errors="replace")
            raise BadInput(f"the prefill server at {self._address} refuses: {why}; start both with the same settings")
        return sock, bytes(answer.head)

    def _run(self, connected: tuple[socket.socket, bytes] | None) -> None:
        """In a thread: connect and receive, until the end."""
        while not self._stopped.is_set():
            try:
                self._receive(*(connected or self._connected()))
            except (PeerGone, BadInput) as error:
                self._say(str(error))
            connected = None
            self._stopped.wait(_RETRY_S)

    def _receive(self, sock: socket.socket, offer: bytes) -> None:
        self._sock, self._said = sock, ""
        outgoing: Outgoing = queue.SimpleQueue()
        staged, shared = Staged(), SharedFrames.opened(offer)
        threading.Thread(target=_send_all, args=(sock, outgoing), name="kv-ask", daemon=True).start()
        if shared is not None:
            outgoing.put(Frame(FrameType.SHARE))
        self._worker.between_steps(partial(self._arrivals.opened, outgoing))
        try:
            while True:
                self._hand_over(wire.receive(sock, staged.memory), staged, shared, outgoing)
        finally:
            outgoing.put(None)
            wire.close(sock)
            if shared is not None:
                shared.close()
            self._worker.between_steps(self._arrivals.lost)

    def _hand_over(self, frame: Frame, staged: Staged, shared: SharedFrames | None, outgoing: Outgoing) -> None:
        if frame.kind is FrameType.BLOCKS:
            self._take(frame, frame.payload, partial(staged.give_back, frame.payload))
        elif frame.kind is FrameType.SHARED_BLOCKS and shared is not None:
            (slot, size), frame = wire.read_slot(frame)
            payload = shared.frame(slot, size)
            self._take(frame, payload, partial(outgoing.put, Frame(FrameType.FREE, slot)))
        elif frame.kind is FrameType.DONE:
            self._worker.between_steps(partial(self._arrivals.done, frame.number, bool(frame.head)))

    def _take(self, frame: Frame, payload: memoryview, give_back: Callable[[], None]) -> None:
        entries = wire.read_entries(frame)
        if len(payload) != len(entries) * self._block_bytes:
            raise PeerGone("it sent blocks of another size")
        self._worker.between_steps(partial(self._arrivals.take, frame.number, entries, payload, give_back))

    def _say(self, text: str) -> None:
        """One line, once."""
        if text != self._said and not self._stopped.is_set():
            self._said = text
            print(f"prefill server: {text}; prompts are computed here until it is back", file=sys.stderr, flush=True)


def _send_all(sock: socket.socket, outgoing: Outgoing) -> None:
    """In a thread, so that a prefill server that does not read holds up no step."""
    while (frame := outgoing.get()) is not None:
        try:
            wire.send(sock, frame)
        except PeerGone:
            return wire.close(sock)
