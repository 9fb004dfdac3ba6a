"""The decode side's connection to a prefill server: made again whenever it ends, and read by a thread that hands what
comes to the engine's thread.

Blocks come in frames of the connection, or, from a server on the same host, in memory that both share.
"""

from __future__ import annotations

import socket
import sys
import threading
from functools import partial
from typing import Protocol

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_reader import Arrived, BlockReader, Outgoing, ask, dial
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone, Welcome
from armillary.engine.engine_thread import EngineThread
from armillary.errors import BadInput

_RETRY_S = 1.0


class Arrivals(Protocol):
    """What takes what comes, in the engine's thread."""

    def opened(self, outgoing: Outgoing, welcome: Welcome) -> None:
        """There is a connection: `outgoing` is sent."""

    def take(self, entries: list[tuple[int, int]], arrived: Arrived) -> None:
        """Blocks of a request."""

    def done(self, number: int, failed: bool) -> None:
        """No more blocks of a request will come."""

    def lost(self) -> None:
        """The connection has ended."""


class PrefillConnection:
    """One at a time, to one address."""

    def __init__(
        self, worker: EngineThread, arrivals: Arrivals, *, address: str, fingerprint: bytes, ranks: int
    ) -> None:
        self._worker, self._arrivals = worker, arrivals
        self._address, self._fingerprint, self._ranks = address, fingerprint, ranks
        self._stopped = threading.Event()
        self._sock: socket.socket | None = None
        self._said = ""

    def connect(self) -> None:
        """Connect, and again whenever the connection ends. BadInput where the prefill server refuses; one that does not
        answer may come later."""
        connected: tuple[socket.socket, Welcome] | None = None
        try:
            connected = self._connected()
        except PeerGone as error:
            self._say(str(error))
        threading.Thread(target=self._run, args=(connected,), name="kv-receive", daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        self.drop()

    def drop(self) -> None:
        """End the connection; another follows."""
        if self._sock is not None:
            wire.close(self._sock)

    def _connected(self) -> tuple[socket.socket, Welcome]:
        sock = dial(wire.parse_address(self._address))
        answer = ask(sock, wire.hello(self._fingerprint, self._ranks))
        if answer.kind is not FrameType.HELLO:
            sock.close()
            why = bytes(answer.head).decode(errors="replace")
            raise BadInput(f"the prefill server at {self._address} refuses: {why}; start both with the same settings")
        return sock, Welcome.read(answer)

    def _run(self, connected: tuple[socket.socket, Welcome] | None) -> None:
        """In a thread: connect and receive, until the end."""
        while not self._stopped.is_set():
            try:
                self._receive(*(connected or self._connected()))
            except (PeerGone, BadInput) as error:
                self._say(str(error))
            connected = None
            self._stopped.wait(_RETRY_S)

    def _receive(self, sock: socket.socket, welcome: Welcome) -> None:
        self._sock, self._said = sock, ""
        reader = BlockReader(sock, welcome.offer)
        self._worker.between_steps(partial(self._arrivals.opened, reader.outgoing, welcome))
        try:
            while True:
                self._hand_over(reader.read())
        finally:
            reader.close()
            self._worker.between_steps(self._arrivals.lost)

    def _hand_over(self, frame: Frame | Arrived) -> None:
        if isinstance(frame, Arrived):
            entries = wire.read_entries(frame.entries, frame.head)
            self._worker.between_steps(partial(self._arrivals.take, entries, frame))
        elif frame.kind is FrameType.DONE:
            self._worker.between_steps(partial(self._arrivals.done, frame.number, bool(frame.head)))

    def _say(self, text: str) -> None:
        """One line, once."""
        if text != self._said and not self._stopped.is_set():
            self._said = text
            print(f"prefill server: {text}; prompts are computed here until it is back", file=sys.stderr, flush=True)
