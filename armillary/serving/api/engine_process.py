"""The server's side of the engine: starts its process, sends requests, hands tokens to mailboxes, and starts it again.

An engine that dies takes the requests in it along: each gets one clear line. The server stays and waits for the next.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from armillary.errors import ArmillaryError, BadInput
from armillary.serving.api.channel import (
    INDEX_BITS,
    Abort,
    Failed,
    Orders,
    Refused,
    Started,
    Submit,
    Turn,
    frame,
    read_message,
)  # fmt: skip
from armillary.serving.api.mailbox import End, Mailbox
from armillary.serving.api.metrics import Metrics
from armillary.serving.api.problem import Problem, bad
from armillary.serving.engine.params import SamplingParams

State = Literal["loading", "ready", "restarting", "stopped"]
_MASK = (1 << INDEX_BITS) - 1
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""before an engine is started again, by how many failed without serving anybody"""


@dataclass(slots=True)
class _Sent:
    """A request that the engine works on."""

    box: Mailbox
    """where its answers go"""
    first: int
    """the choice that its first answer is"""
    left: int
    """answers that are not over"""


class EngineProcess:
    """One engine, in as many processes as it has ranks."""

    def __init__(self, orders: Orders, *, ranks: int, metrics: Metrics, say: Callable[[str], None]) -> None:
        self.orders = orders
        self.metrics = metrics
        self.state: State = "loading"
        self.started: Started | None = None
        """what the engine told about itself, once it was ready"""
        self._ranks = ranks
        self._say = say
        self._numbers = count(1)
        self._sent: dict[int, _Sent] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._socks: list[socket.socket] = []
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._first: asyncio.Future[Started] | None = None
        self._failures = 0

    # --- for the server

    async def start(self) -> Started:
        """Start the engine; ArmillaryError where it cannot."""
        self._first = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self._watch())]
        return await self._first

    async def stop(self) -> None:
        """End the engine; whoever still waits for it is told."""
        self.state = "stopped"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._kill()
        self._fail_all("the server is shutting down; ask again later")

    @property
    def pids(self) -> list[int]:
        """Its processes, the first rank's first."""
        return [process.pid for process in self._processes]

    @property
    def num_requests(self) -> int:
        """Prompts that are with the engine."""
        return len(self._sent)

    def quiet_s(self) -> float:
        """Since the engine was last heard of: it speaks after every step, and twice a second when idle."""
        return time.monotonic() - self._heard_at

    def trouble(self) -> str | None:
        """Why no request can be served now; none: all is well."""
        if self.state != "ready":
            return {"loading": "the model is being loaded", "restarting": "the engine failed and is starting again",
                    "stopped": "the server is shutting down"}[self.state]  # fmt: skip
        if self.quiet_s() > self.orders.serve.frozen_s:
            return f"the engine has not taken a step for {self.quiet_s():.0f} s"
        return None

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, box: Mailbox, choice: int, *,
        timeout_s: float | None = None, priority: int = 0, salt: str = "",
    ) -> int:  # fmt: skip
        """Send a request; its answers come to `box` as choices from `choice` on. Its number, for `abort`."""
        if self.state != "ready" or self._writer is None:
            raise self.unavailable()
        number = next(self._numbers)
        self._sent[number] = _Sent(box, choice, params.n)
        ids = array("i", prompt).tobytes()
        self._write(Submit(number=number, prompt=ids, params=params, timeout_s=timeout_s, priority=priority, salt=salt))
        return number

    def abort(self, number: int, index: int | None = None) -> None:
        """Nobody waits for a request any more, or one of its answers has come to a stop text."""
        if index is None:
            sent = self._sent.pop(number, None)
            if sent is None:
                return
            self.metrics.finished["abort"] += sent.left
        self._write(Abort(number=number, index=index))

    def give_up(self, message: str) -> None:
        """Everybody who still waits is told so."""
        for number in self._sent:
            self._write(Abort(number=number))
        self._fail_all(message)

    def unavailable(self) -> Problem:
        why = self.trouble() or "the engine is not there"
        return Problem(503, f"{why}; try again in a moment", code="engine_unavailable", retry_after_s=2)

    # --- its life

    async def _live(self) -> None:
        """Start, serve, and start again."""
        while self.state != "stopped":
            reader = await self._spawn()
            while (message := await read_message(reader)) is not None:
                self._heard_at = time.monotonic()
                self._take(message)
                if self._first is not None and self._first.done() and self._first.exception():
                    return
            await self._lost()

    async def _spawn(self) -> asyncio.StreamReader:
        """Start a process for each rank; the first one's socket is the one to talk to."""
        port = _free_port() if self._ranks > 1 else 0
        begin = frame(self.orders)
        for rank in range(self._ranks):
            ours, theirs = socket.socketpair()
            self._processes.append(subprocess.Popen(
                [sys.executable, "-m", "armillary.serving.api.engine_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=self._environment(rank, port),
            ))  # fmt: skip
            theirs.close()
            if rank:
                ours.sendall(begin)
                self._socks.append(ours)
            else:
                ours.setblocking(False)
                reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
                self._writer.write(begin)
        self._heard_at = time.monotonic()
        return reader

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """torchrun's variables, where there are several ranks; other launchers' are not for us."""
        found = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            found.pop(key, None)
        if self._ranks > 1:
            found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._ranks),
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        return found

    async def _lost(self) -> None:
        """The engine is gone: tell everybody, and wait a little where that happens again and again."""
        codes = self._kill()
        how = f"killed by signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
        if self._first is not None and not self._first.done():
            self._first.set_exception(BadInput(f"the engine ended while it was loading ({how}); see the lines above"))
            return
        self._failures = 0 if self.state == "ready" else self._failures + 1
        self.state = "restarting"
        self.metrics.engine_lost()
        self.metrics.restarts += 1
        self._say(f"the engine ended ({how}); {len(self._sent)} requests failed; starting it again")
        self._fail_all("the engine failed while it worked on this request; try again")
        await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])

    def _kill(self) -> list[int]:
        """End what is left of the processes; how they ended."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        for sock in self._socks:
            sock.close()
        for process in self._processes:
            process.kill()
        codes = [process.wait() for process in self._processes] or [0]
        self._processes, self._socks = [], []
        return codes

    async def _watch(self) -> None:
        """Ends an engine that hangs, and one that has lost a rank."""
        while True:
            await asyncio.sleep(0.25)
            hung_s = self.orders.serve.hung_s
            hung = self.state == "ready" and hung_s is not None and self.quiet_s() > hung_s
            dead = any(process.poll() is not None for process in self._processes[1:])
            if self._processes and (hung or dead):
                why = f"silent for {self.quiet_s():.0f} s" if hung else "without one of its ranks"
                self._say(f"the engine is {why} and is ended")
                self._processes[0].kill()
                await asyncio.sleep(1.0)

    def _fail_all(self, message: str) -> None:
        sent, self._sent = self._sent, {}
        self.metrics.finished["error"] += sum(one.left for one in sent.values())
        for box in {id(one.box): one.box for one in sent.values()}.values():
            box.fail(Problem(503, message, code="engine_failed", retry_after_s=5))

    # --- what it says

    def _write(self, message: Any) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _take(self, message: Any) -> None:
        if isinstance(message, Turn):
            self._turn(message)
        elif isinstance(message, Refused):
            sent = self._sent.pop(message.number, None)
            if sent is not None:
                sent.box.fail(bad(message.message, code=_code_of(message.message)))
        elif isinstance(message, Started):
            self.started, self.state = message, "ready"
            if self._first is not None and not self._first.done():
                self._first.set_result(message)
            else:
                self._say(f"the engine is back after {dict(message.phases)['in all']:.1f} s")
        elif isinstance(message, Failed) and self._first is not None and not self._first.done():
            why = message.message if message.by_user else f"the engine cannot start ({message.message}); report this"
            self._first.set_exception(ArmillaryError(why))

    def _turn(self, turn: Turn) -> None:
        sent, logprobs, now = self._sent, turn.logprobs, self._heard_at
        observe = self.metrics.histograms["itl_s"].observe
        for number, prompt in turn.prompts.items():
            if number in sent:
                sent[number].box.prompts[sent[number].first] = prompt
        for i, (key, token) in enumerate(zip(turn.keys, turn.tokens, strict=True)):
            one = sent.get(key >> INDEX_BITS)
            if one is not None:
                gap = one.box.token(one.first + (key & _MASK), token, logprobs.get(i) if logprobs else None, now)
                if gap is not None:
                    observe(gap)
        for key, finish, error, gauges in turn.ends:
            self._end(key, End(finish, error, gauges), now)
        if turn.state is not None:
            self.metrics.state(turn.state)

    def _end(self, key: int, end: End, now: float) -> None:
        number = key >> INDEX_BITS
        one = self._sent.get(number)
        if one is None:
            return
        choice = one.first + (key & _MASK)
        self.metrics.ended(one.box, choice, end.finish, end.gauges, now)
        one.box.end(choice, end)
        one.left -= 1
        if not one.left:
            del self._sent[number]


def _code_of(message: str) -> str | None:
    """OpenAI's name for a prompt or answer that is too long, which clients look for."""
    return "context_length_exceeded" if "max_model_len" in message else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
