"""The server's side of the engine: starts its process, sends requests, hands tokens to mailboxes, and starts it again.

An engine that dies takes the requests in it along: each gets one clear line. The server stays and waits for the next.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import ArmillaryError, BadInput
from armillary.serving.http.problem import Problem, bad
from armillary.serving.processes.engine_ipc import (
    INDEX_BITS,
    Abort,
    Failed,
    Orders,
    Refused,
    Started,
    Submit,
    Turn,
    read_message,
)
from armillary.serving.processes.liveness import Liveness
from armillary.serving.processes.mailbox import End, Mailbox
from armillary.serving.processes.ranks import Ranks
from armillary.serving.processes.server_metrics import Metrics
from armillary.spec.tables.serve import Serve

State = Literal["loading", "ready", "restarting", "down", "stopped"]
"""down: it is dead, and no restart is under way"""
_MASK = (1 << INDEX_BITS) - 1
_MOST_PROMPTS = 8
"""prompt tokens that may be here, in sizes of the KV cache"""
_MOST_WAIT_S = 600.0
"""that a request may wait for its start, where serve.max_wait_s does not say"""
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""before an engine is started again, by how many failed without serving anybody"""
_LOOK_S = 0.25
"""between two looks whether the engine hangs"""
_FAILED_STARTS = 3
"""restarts in a row that fail before the engine counts as down between them"""


@dataclass(slots=True)
class _Sent:
    """A request that the engine works on."""

    box: Mailbox
    """where its answers go"""
    first: int
    """the choice that its first answer is"""
    left: int
    """answers that are not over"""
    tokens: int
    """of its prompt"""


def for_engine(serve: Serve) -> Serve:
    """As the engine is told: who may wait is settled at the door, so it takes whoever was let in, and nobody waits for
    ever. An answer that has begun takes the time it takes."""
    return replace(serve, max_waiting=None, max_wait_s=_MOST_WAIT_S if serve.max_wait_s is None else serve.max_wait_s)


class EngineProcess:
    """One engine, in as many processes as it has ranks."""

    def __init__(self, orders: Orders, *, ranks: int, metrics: Metrics, say: Callable[[str], None]) -> None:
        self.orders = orders
        self.metrics = metrics
        self.state: State = "loading"
        self.started: Started | None = None
        """what the engine told about itself, once it was ready"""
        self._ranks = Ranks(ranks)
        self._say = say
        self._numbers = count(1)
        self._sent: dict[int, _Sent] = {}
        self._tokens = 0
        """of all prompts that are with the engine"""
        self._liveness = Liveness(frozen_s=orders.serve.frozen_s, hung_s=orders.serve.hung_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._first: asyncio.Future[Started] | None = None
        self._failures = 0
        self._why_down = ""
        self._at_first = True

    # --- for the server

    async def start(self) -> Started:
        """Start the engine; ArmillaryError where it cannot."""
        self._first = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self._watch())]
        self._tasks[0].add_done_callback(self._over)
        return await self._first

    async def stop(self) -> None:
        """End the engine; whoever still waits for it is told."""
        self.state = "stopped"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ranks.end()
        self._fail_all("the server is shutting down; ask again later")

    @property
    def pid(self) -> int | None:
        """Of the process that answers; none while there is none."""
        return self._ranks.pid

    @property
    def num_requests(self) -> int:
        """Prompts that are with the engine."""
        return len(self._sent)

    def trouble(self) -> str | None:
        """Why no request can be served now; none: all is well."""
        if self.state != "ready":
            return {
                "loading": "the model is being loaded",
                "restarting": "the engine failed and is starting again",
                "down": self._why_down,
                "stopped": "the server is shutting down",
            }[self.state]
        return self._liveness.slow()

    def dead(self) -> str | None:
        """Why there is no engine and none on its way, so that only a new server may help; none: there is one."""
        return self.trouble() if self.state in ("down", "stopped") else None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        box: Mailbox,
        choice: int,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        salt: str = "",
    ) -> int:
        """Send a request; its answers come to `box` as choices from `choice` on. Its number, for `abort`."""
        if self.state != "ready" or not self._ranks.alive:
            raise self.unavailable()
        self._make_room(len(prompt))
        number = next(self._numbers)
        self._sent[number] = _Sent(box, choice, params.n, len(prompt))
        self._tokens += len(prompt)
        self._ranks.send(
            Submit(
                number=number,
                prompt=array("i", prompt).tobytes(),
                params=params,
                timeout_s=timeout_s,
                priority=priority,
                salt=salt,
            )
        )
        return number

    def abort(self, number: int, index: int | None = None) -> None:
        """Nobody waits for a request any more, or one of its answers has come to a stop text."""
        if index is None and self._forget(number) is None:
            return
        self._ranks.send(Abort(number=number, index=index))

    def _make_room(self, tokens: int) -> None:
        """Prompts that wait are kept in memory: no more of them than the cache could take in a few turns."""
        assert self.started is not None, "an engine that is ready has said what it holds"
        if self._sent and self._tokens + tokens > self.started.kv_tokens * _MOST_PROMPTS:
            self.metrics.rejected += 1
            raise Problem(
                429,
                f"prompts of {self._tokens:,} tokens are here, as many as may; try again later",
                code="rate_limit_exceeded",
                retry_after_s=5,
            )

    def _forget(self, number: int) -> _Sent | None:
        sent = self._sent.pop(number, None)
        self._tokens -= sent.tokens if sent is not None else 0
        return sent

    def give_up(self, message: str) -> None:
        """Everybody who still waits is told so."""
        for number in self._sent:
            self._ranks.send(Abort(number=number))
        self._fail_all(message)

    def unavailable(self) -> Problem:
        why = self.trouble() or "the engine is not there"
        return Problem(503, f"{why}; try again in a moment", code="engine_unavailable", retry_after_s=2)

    # --- its life

    async def _live(self) -> None:
        """Start, serve, and start again."""
        assert self._first is not None, "it is started once"
        while not (self._first.done() and self._first.exception()):
            orders = replace(self.orders, serve=for_engine(self.orders.serve))
            self._liveness.heard()
            if self.state == "down":
                self.state = "restarting"
            try:
                await self._listen(await self._ranks.start(orders))
            except OSError as error:  # no memory, processes or files for another one now; there may be later
                self._say(f"the engine's process cannot be started ({error.strerror or error})")
            except Exception as error:  # a bug of ours: what waits may wait for ever, so all of it begins anew
                traceback.print_exc()
                self._say(f"what the engine said was not understood ({type(error).__name__}: {error}); report this")
            await self._lost()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until the engine is gone."""
        while (message := await read_message(reader)) is not None:
            self._liveness.heard(message)
            self._take(message)

    async def _lost(self) -> None:
        """The engine is gone: tell everybody, and wait a little where that happens again and again."""
        code = await self._ranks.end()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if self.started is None:
            if self._first is not None and not self._first.done() and not self._another_port():
                text = f"the engine ended while it was loading ({how}); see the lines above"
                self._first.set_exception(BadInput(text))
            return
        self._failures = 0 if self.state == "ready" else self._failures + 1
        self.state = "restarting"
        self.metrics.engine_lost()
        self.metrics.restarts += 1
        self._say(f"the engine ended ({how}); {len(self._sent)} requests failed; starting it again")
        self._fail_all("the engine failed while it worked on this request; try again")
        if self._failures >= _FAILED_STARTS:
            self._why_down = f"the engine ended ({how}) and could not be started again {self._failures} times in a row"
            self.state = "down"
        await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])

    def _over(self, task: asyncio.Task[None]) -> None:
        """Nobody starts engines any more: a bug, unless the server ends."""
        if self.state == "stopped" or task.cancelled():
            return
        if (error := task.exception()) is not None:
            traceback.print_exception(error)
        self._why_down = "the engine ended and is not started again; restart the server"
        self.state = "down"
        self._fail_all(self._why_down)

    def _another_port(self) -> bool:
        """Whether to start once more: several ranks meet at a port that was free when they were started, and may have
        been taken since."""
        first, self._at_first = self._at_first, False
        return first and self._ranks.count > 1

    async def _watch(self) -> None:
        """Ends an engine that hangs, and one that has lost a rank."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            late_s, looked_at = time.monotonic() - looked_at - _LOOK_S, time.monotonic()
            if late_s > _LOOK_S:  # this process was stopped, or busy: what the engine said is still to be read
                self._liveness.excuse(late_s)
            hung = self._liveness.hung() if self.state == "ready" else None
            lost = "it is without one of its ranks" if self._ranks.lost_one() else None
            if self._ranks.alive and (hung or lost):
                self._say(f"the engine is ended: {hung or lost}")
                self._ranks.kill()
                await asyncio.sleep(1.0)

    def _fail_all(self, message: str) -> None:
        sent, self._sent, self._tokens = self._sent, {}, 0
        for box in {id(one.box): one.box for one in sent.values()}.values():
            box.fail(Problem(503, message, code="engine_failed", retry_after_s=5))

    # --- what it says

    def _take(self, message: Any) -> None:
        if isinstance(message, Turn):
            self._turn(message)
        elif isinstance(message, Refused):
            sent = self._forget(message.number)
            if sent is not None:
                sent.box.fail(self._refusal(message))
        elif isinstance(message, Started):
            self.started, self.state = message, "ready"
            if self._first is not None and not self._first.done():
                self._first.set_result(message)
            else:
                self._say(f"the engine is back after {dict(message.phases)['in all']:.1f} s")
        elif isinstance(message, Failed):
            why = message.message if message.by_user else f"the engine cannot start ({message.message}); report this"
            if self._first is None or self._first.done() or (not message.by_user and self._ranks.count > 1):
                self._say(why)
            else:
                self._first.set_exception(ArmillaryError(why))

    def _refusal(self, message: Refused) -> Problem:
        if not message.busy:
            return bad(message.message, code=_code_of(message.message))
        self.metrics.rejected += 1
        return Problem(429, message.message, code="rate_limit_exceeded", retry_after_s=5)

    def _turn(self, turn: Turn) -> None:
        sent, logprobs, now = self._sent, turn.logprobs, self._liveness.heard_at
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
        self.metrics.ended(one.box, choice, end.gauges, now, first=not key & _MASK)
        one.box.end(choice, end)
        one.left -= 1
        if not one.left:
            self._forget(number)


def _code_of(message: str) -> str | None:
    """OpenAI's name for a prompt or answer that is too long, which clients look for."""
    return "context_length_exceeded" if "max_model_len" in message else None
