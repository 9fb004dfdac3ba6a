"""Sends blocks to one rank of a decode server, over a connection that may come later than the first of them."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import Payload
from armillary.engine.disaggregation.shared_memory import SharedSlots
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone


class BlockSender:
    """A queue of frames, and a thread that sends them."""

    def __init__(
        self,
        slots: SharedSlots | None,
        *,
        on_sent: Callable[[int, float], None] = lambda num_bytes, seconds: None,
        on_taken: Callable[[int], None] = lambda num_bytes: None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """`slots` of memory to share with the other side, where it is on this host. `on_sent` gets bytes and seconds,
        `on_taken` the bytes that the other side has or that are in its connection, `on_gone` the end of it."""
        self._slots = slots
        self._on_sent, self._on_taken, self._on_gone = on_sent, on_taken, on_gone
        self._shared_bytes: dict[int, int] = {}  # of slots that the other side has not read yet
        self._queue: queue.SimpleQueue[tuple[Frame, Payload | None] | None] = queue.SimpleQueue()
        self._sock: socket.socket | None = None

    def offer(self) -> bytes:
        """Of shared memory."""
        return b"" if self._slots is None else self._slots.offer()

    def start(self, sock: socket.socket) -> None:
        """Send what is queued over this connection."""
        self._sock = sock
        threading.Thread(target=self._run, args=(sock,), name="kv-send", daemon=True).start()

    def shared_slot(self) -> tuple[int, Tensor] | None:
        """Memory that the other side sees; None where there is none, or none left: then the connection carries them."""
        return None if self._slots is None else self._slots.take()

    def put(self, frame: Frame, payload: Payload | None = None) -> None:
        self._queue.put((frame, payload))

    def take(self, frame: Frame) -> None:
        """What the other side says of shared memory; other frames are not for the sender."""
        if self._slots is None:
            return
        if frame.kind is FrameType.SHARE:
            self._slots.accepted()
        elif frame.kind is FrameType.FREE:
            if frame.number not in self._shared_bytes:
                raise PeerGone("it gave back memory that it did not have")
            size = self._shared_bytes.pop(frame.number)
            self._slots.give_back(frame.number)
            self._on_taken(size)

    def close(self) -> None:
        if self._sock is not None:
            wire.close(self._sock)
        if self._slots is not None:
            self._slots.close()
        self._queue.put(None)

    def _run(self, sock: socket.socket) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=1.0)
                except queue.Empty:
                    item = Frame(FrameType.ALIVE), None
                if item is None:
                    return
                self._send(sock, *item)
        except PeerGone as error:
            print(f"a decode server is gone: {error}", file=sys.stderr, flush=True)
            self._on_gone()

    def _send(self, sock: socket.socket, frame: Frame, payload: Payload | None) -> None:
        data = payload.data() if payload is not None else memoryview(b"")
        begin = time.monotonic()
        if payload is not None and payload.slot is not None:
            self._shared_bytes[payload.slot] = len(data)
            head = wire.SLOT.pack(payload.slot, len(data)) + bytes(frame.head)
            wire.send(sock, frame._replace(kind=FrameType.SHARED_BLOCKS, head=head))
            return self._on_sent(len(data), time.monotonic() - begin)
        wire.send(sock, frame._replace(payload=data))
        self._on_sent(len(data), time.monotonic() - begin)
        if payload is not None:
            payload.release()
        self._on_taken(len(data))
