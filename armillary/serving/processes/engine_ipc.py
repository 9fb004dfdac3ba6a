"""Messages between the server and its engine, as frames over a socket pair.

Both ends are processes of ours, and no other process can reach the socket. Neither end waits for the other to read: the
server writes through asyncio, and the engine queues what the kernel does not accept for a thread to send.
"""

import select
import socket
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.telemetry.gauges import request_gauges
from armillary.serving.processes.worker_process import frame
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home

_SEND_BYTES = 1 << 20
INDEX_BITS = 10
"""a sequence's key is its request's number and, in this many low bits, its index within the request"""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """This node among those of an engine: `host` and `port` of the first, where the others report."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The first message to an engine process: the model as the user named it, the device (none: the best one), the time
    at which the process was started, the file for gauges (none: they are not recorded), and files with the user's
    model families."""

    model: str
    serve: Serve
    home: Home
    device: str | None = None
    asked_at: float = 0.0
    gauges: Path | None = None
    model_code: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    """key and folder of LoRA adapters that are loaded before the engine is ready"""
    nodes: NodePlace = NodePlace()
    program: str = "armillary.serving.processes.engine_main"
    """module that the engine's processes run"""


@dataclass(frozen=True, kw_only=True)
class Submit:
    """A request to the engine: token ids as 32-bit integers, and sampling parameters without stop strings, which the
    server looks for."""

    number: int
    prompt: bytes
    params: SamplingParams
    timeout_s: float | None
    priority: int = 0
    salt: str = ""
    adapter: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadAdapter:
    """Load a LoRA adapter under a new key; answered by an `AdapterResult` of the same number."""

    number: int
    key: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    """Forget an adapter."""

    key: str


@dataclass(frozen=True, kw_only=True)
class AdapterResult:
    """An adapter is loaded, or why it is not."""

    number: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Abort a request, or the sequence `index` of it."""

    number: int
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineReady:
    """The engine is ready: its limits, the capacity of its KV cache in tokens and as text, the seconds of each phase of
    its start, and notes for the user."""

    max_model_len: int
    kv_tokens: int
    kv_text: str
    phases: list[tuple[str, float]]
    notes: tuple[str, ...] = ()
    lost_adapters: dict[str, str] = field(default_factory=dict)
    """key -> why, of adapters that could not be loaded"""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The engine cannot start; `by_user`: the user can correct the cause."""

    message: str
    by_user: bool


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that cannot be served; `overloaded`: a queue is full, and it may be accepted later."""

    number: int
    message: str
    code: str | None = None
    overloaded: bool = False


@dataclass
class StepOutput:
    """Tokens of one engine step; an empty message shows that the engine is alive."""

    keys: list[int] = field(default_factory=list)
    """key of the sequence of each token"""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """position in `tokens` -> (token, log-probability, top tokens)"""
    prompts: dict[int, list[Any]] = field(default_factory=dict)
    """request number -> log-probabilities of its prompt"""
    pooled: dict[int, bytes] = field(default_factory=dict)
    """request number -> vector of its prompt, as 32-bit floats"""
    ends: list[tuple[int, str, str, dict[str, float]]] = field(default_factory=list)
    """(key, finish reason, error, gauges of the request)"""
    state: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StepOutput, (self.keys, self.tokens, self.logprobs, self.prompts, self.pooled, self.ends, self.state)


@dataclass(frozen=True, kw_only=True)
class HeartbeatMessage:
    """The engine is alive during a long step, which has run for `step_s`; its thread last advanced in its program
    `still_s` ago. `expected_s` is the upper estimate for steps of so many tokens; none: not known yet."""

    step_s: float
    still_s: float
    tokens: int
    expected_s: float | None


class SendQueue:
    """In the engine: messages to the server; sending never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._left = bytearray()

    def send(self, message: Any) -> None:
        """Send, or queue what the kernel does not accept now."""
        data = frame(message)
        with self._lock:
            if self._left:
                self._left += data
                return
            sent = self._try(data)
            if sent < len(data):
                self._left += memoryview(data)[sent:]
                threading.Thread(target=self._push, name="send-queue", daemon=True).start()

    def _push(self) -> None:
        """In a thread: send the queued bytes as the other end reads."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                del self._left[: self._try(bytes(self._left[:_SEND_BYTES]))]
                if not self._left:
                    return

    def _try(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the server is gone; the thread that reads from it ends this process


_STATE_S = 0.2
"""interval of the engine's state gauges"""


class OutputSender:
    """Collects the tokens of a step and sends them."""

    def __init__(self, state: Callable[[], dict[str, Any]], send: Callable[[StepOutput], None]) -> None:
        """`state`: the engine's gauges, sent now and then."""
        self._state = state
        self._send = send
        self._output = StepOutput()
        self._state_at = 0.0

    def take(self, deltas: list[OutputDelta]) -> None:
        """In the engine's thread: add the output of a step or an abort."""
        output = self._output
        for delta in deltas:
            seq = delta.sequence
            key = int(seq.request.id) << INDEX_BITS | seq.index
            if delta.logprobs:
                output.logprobs[len(output.tokens)] = tuple(delta.logprobs[0])
            if seq.prompt_logprobs and seq.index == 0 and seq.num_output <= 1:
                output.prompts[int(seq.request.id)] = list(map(tuple, seq.prompt_logprobs))
            if delta.tokens:
                output.keys.append(key)
                output.tokens.append(delta.tokens[0])
            if delta.finish is not None:
                if seq.pooled:
                    output.pooled[int(seq.request.id)] = array("f", seq.pooled).tobytes()
                output.ends.append((key, delta.finish, delta.error, request_gauges(seq)))

    def flush(self) -> None:
        """At the end of a step: send its output, even where it is empty."""
        output, self._output = self._output, StepOutput()
        now = time.monotonic()
        if now - self._state_at >= _STATE_S:
            self._state_at, output.state = now, self._state()
        self._send(output)
