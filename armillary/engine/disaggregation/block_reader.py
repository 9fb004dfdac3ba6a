"""Reads frames of blocks from one rank of a prefill server: over its connection, or where both are on one host in
memory that both share."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.shared_memory import SharedFrames
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone

Outgoing = queue.SimpleQueue[Frame | None]
_STAGED_FRAMES = 4
"""frames of blocks that were read and are not in the cache yet; beyond, the connection is not read"""


@dataclass(frozen=True)
class Arrived:
    """Blocks in the order of their frame; `give_back` when they were read."""

    number: int
    """of the request"""
    entries: int
    head: bytes | memoryview
    payload: memoryview
    give_back: Callable[[], None]


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


class BlockReader:
    """Of one connection that has been greeted."""

    def __init__(self, sock: socket.socket, offer: bytes) -> None:
        """`offer`: what the other side says of memory to share."""
        self._sock, self._staged, self._shared = sock, Staged(), SharedFrames.opened(offer)
        self.outgoing: Outgoing = queue.SimpleQueue()
        threading.Thread(target=_send_all, args=(sock, self.outgoing), name="kv-ask", daemon=True).start()
        if self._shared is not None:
            self.outgoing.put(Frame(FrameType.SHARE))

    def read(self) -> Frame | Arrived:
        """The next frame, or the next blocks; PeerGone at the end."""
        frame = wire.receive(self._sock, self._staged.memory)
        if frame.kind is FrameType.BLOCKS:
            give_back = partial(self._staged.give_back, frame.payload)
            return Arrived(frame.number, frame.entries, frame.head, frame.payload, give_back)
        if frame.kind is FrameType.SHARED_BLOCKS and self._shared is not None:
            (slot, size), frame = wire.read_slot(frame)
            give_back = partial(self.outgoing.put, Frame(FrameType.FREE, slot))
            return Arrived(frame.number, frame.entries, frame.head, self._shared.frame(slot, size), give_back)
        return frame

    def close(self) -> None:
        self.outgoing.put(None)
        wire.close(self._sock)
        if self._shared is not None:
            self._shared.close()


def dial(address: tuple[str, int]) -> socket.socket:
    """PeerGone where nobody answers."""
    try:
        sock = socket.create_connection(address, timeout=wire.SILENCE_S)
    except OSError as error:
        raise PeerGone(f"no prefill server at {address[0]}:{address[1]} ({error.strerror or error})") from None
    wire.prepare(sock)
    return sock


def ask(sock: socket.socket, greeting: Frame) -> Frame:
    """The answer to a greeting; the connection is closed where there is none."""
    try:
        wire.send(sock, greeting)
        return wire.receive(sock)
    except PeerGone:
        sock.close()
        raise


def _send_all(sock: socket.socket, outgoing: Outgoing) -> None:
    """In a thread, so that a prefill server that does not read holds up no step."""
    while (frame := outgoing.get()) is not None:
        try:
            wire.send(sock, frame)
        except PeerGone:
            return wire.close(sock)
