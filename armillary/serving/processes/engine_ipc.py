"""The wire between the server and its engine: frames over a socket pair, each one pickled message.

Both ends are processes of ours, and nobody else can reach the socket. Neither end ever waits for the other to read: the
server writes through asyncio, the engine keeps what the kernel does not take and a thread sends it on.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from armillary.engine.output.output_text import Piece
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.telemetry.gauges import request_gauges, state_gauges
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home

_HEAD = struct.Struct("<I")
_AT_ONCE = 1 << 20
INDEX_BITS = 10
"""a sequence's key is its request's number and, in so many bits, which of its answers it is"""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What an engine process is told once."""

    model: str
    """as the user named it"""
    serve: Serve
    """how it is set up"""
    home: Home
    """where runs, releases and measured peaks are"""
    device: str | None = None
    """none: the best there is"""
    asked_at: float = 0.0
    """when the process was started, by the wall clock"""
    gauges: Path | None = None
    """where steps and requests are recorded; none: nowhere"""


@dataclass(frozen=True, kw_only=True)
class Submit:
    """A request on its way to the engine."""

    number: int
    """its name"""
    prompt: bytes
    """token ids as 32-bit integers"""
    params: SamplingParams
    """without stop texts, which the server looks for"""
    timeout_s: float | None
    """given up by the engine then"""
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Give a request up: all of it, or one of its answers, whose text has come to its end."""

    number: int
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Started:
    """The engine is ready."""

    max_model_len: int
    vocab: int
    kv_tokens: int
    """tokens the KV cache holds"""
    kv_text: str
    """the same for people"""
    phases: list[tuple[str, float]]
    """what the start consisted of, and its seconds"""
    notes: tuple[str, ...] = ()
    """what whoever started it should know, a line each"""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The engine cannot start, and why."""

    message: str
    by_user: bool
    """whether that is for the user to put right"""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that cannot be served."""

    number: int
    message: str
    busy: bool = False
    """not because of what it is: it may be asked again later"""


@dataclass(kw_only=True)
class Turn:
    """What one turn of the engine's loop brought; empty ones say that it is alive."""

    keys: list[int] = field(default_factory=list)
    """whose token it is"""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """position in `tokens` -> (logprob, likeliest)"""
    prompts: dict[int, list[Any]] = field(default_factory=dict)
    """request -> log-probabilities of its prompt"""
    ends: list[tuple[int, str, str, dict[str, float]]] = field(default_factory=list)
    """key, why it ended, what went wrong, gauges of the request"""
    state: dict[str, float] | None = None
    """gauges of the engine, now and then"""

    def __reduce__(self) -> tuple[Any, ...]:
        return _turn, (self.keys, self.tokens, self.logprobs, self.prompts, self.ends, self.state)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The engine lives, and a turn of its loop takes long."""

    step_s: float
    """how long so far"""
    still_s: float
    """since its thread was last seen to move on in the program"""
    tokens: int
    """that the steps under way compute"""
    expected_s: float | None
    """what such steps are expected to take at most; none: not known yet"""


def _turn(
    keys: list[int],
    tokens: list[int],
    logprobs: dict[int, Any],
    prompts: dict[int, Any],
    ends: list[Any],
    state: dict[str, float] | None,
) -> Turn:
    return Turn(keys=keys, tokens=tokens, logprobs=logprobs, prompts=prompts, ends=ends, state=state)


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


async def read_message(reader: StreamReader) -> Any:
    """The next message; None where the other end is gone."""
    try:
        (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return pickle.loads(await reader.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None


def messages(sock: socket.socket) -> Generator[Any, None, None]:
    """In the engine: messages as they come, until the server is gone."""
    with sock.makefile("rb") as file:
        while (body := _body(file)) is not None:
            yield pickle.loads(body)


def _body(file: BinaryIO) -> bytes | None:
    """Of the next frame; a server that left what we said unread has reset the socket, and is gone as well."""
    with suppress(ConnectionError):
        if len(head := file.read(_HEAD.size)) == _HEAD.size:
            (length,) = _HEAD.unpack(head)
            body = file.read(length)
            return body if len(body) == length else None
    return None


class Outlet:
    """In the engine: what goes to the server; sending never waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._left = bytearray()
        """what waits for room, in order; a thread is at it as long as there is something"""

    def send(self, message: Any) -> None:
        """Send, or keep what the kernel does not take now."""
        data = frame(message)
        with self._lock:
            if self._left:
                self._left += data
                return
            sent = self._try(data)
            if sent < len(data):
                self._left += memoryview(data)[sent:]
                threading.Thread(target=self._push, name="outlet", daemon=True).start()

    def _push(self) -> None:
        """In a thread: send what is left as the other end reads, until nothing is."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                del self._left[: self._try(bytes(self._left[:_AT_ONCE]))]
                if not self._left:
                    return

    def _try(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the server is gone; whoever reads from it ends this process


_STATE_S = 0.2
"""between two looks at the engine's state"""


class Turns:
    """Collects the pieces of a turn and sends them."""

    def __init__(self, scheduler: Scheduler, send: Callable[[Turn], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._turn = Turn()
        self._state_at = 0.0

    def take(self, pieces: list[Piece]) -> None:
        """In the engine's thread: what a step, or an abort, brought."""
        turn = self._turn
        for piece in pieces:
            seq = piece.sequence
            key = int(seq.request.id) << INDEX_BITS | seq.index
            if piece.logprobs:
                turn.logprobs[len(turn.tokens)] = tuple(piece.logprobs[0])
            if seq.prompt_logprobs and seq.index == 0 and seq.num_output <= 1:
                turn.prompts[int(seq.request.id)] = list(map(tuple, seq.prompt_logprobs))
            if piece.tokens:
                turn.keys.append(key)
                turn.tokens.append(piece.tokens[0])
            if piece.finish is not None:
                turn.ends.append((key, piece.finish, piece.error, request_gauges(seq)))

    def flush(self) -> None:
        """At the end of a turn: send it, also where it is empty."""
        turn, self._turn = self._turn, Turn()
        now = time.monotonic()
        if now - self._state_at >= _STATE_S:
            self._state_at, turn.state = now, state_gauges(self._scheduler)
        self._send(turn)
