"""The server's side of the engine: starts its processes, sends requests, delivers tokens to mailboxes, restarts it.

When the engine dies, its requests fail with one clear line each; the server keeps running and starts the next engine.
"""

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
from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.processes.adapter_client import AdapterClient
from armillary.serving.processes.engine_ipc import (
    INDEX_BITS,
    Abort,
    AdapterResult,
    EngineConfig,
    EngineReady,
    Failed,
    Refused,
    StepOutput,
    Submit,
)
from armillary.serving.processes.liveness import Liveness
from armillary.serving.processes.rank_processes import Ranks
from armillary.serving.processes.request_mailbox import FinishEvent, Mailbox
from armillary.serving.processes.server_metrics import Metrics
from armillary.serving.processes.worker_process import exit_text, read_message
from armillary.spec.tables.serve import Serve
from armillary.store.adapter_folders import adapter_folders

State = Literal["loading", "ready", "restarting", "down", "stopped"]
"""down: the engine is dead and no restart is in progress"""
_MASK = (1 << INDEX_BITS) - 1
_MAX_PROMPTS = 8
"""limit of prompt tokens in flight, in multiples of the KV cache"""
_MAX_WAIT_S = 600.0
"""time limit for the start of a request where serve.max_wait_s is not set"""
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""delay of a restart, by the number of consecutive engines that never became ready"""
_LIVENESS_CHECK_S = 0.25
_FAILED_STARTS = 3
"""consecutive failed restarts after which the engine counts as down"""


@dataclass(slots=True)
class _InFlight:
    """A request that the engine has: its mailbox, the choice index of its first sequence, the sequences that have not
    ended, and the tokens of its prompt."""

    box: Mailbox
    first: int
    left: int
    tokens: int


def for_engine(serve: Serve) -> Serve:
    """The engine's settings: the server limits the queue, so the engine accepts every request, and limits only the time
    until a request starts."""
    return replace(
        serve,
        adapters="",  # the client names them
        max_waiting=None,
        max_wait_s=_MAX_WAIT_S if serve.max_wait_s is None else serve.max_wait_s,
    )


class EngineClient:
    """One engine, in as many processes as it has ranks."""

    def __init__(self, config: EngineConfig, *, ranks: int, metrics: Metrics, say: Callable[[str], None]) -> None:
        self.config = config
        self.metrics = metrics
        self.state: State = "loading"
        self.retired = False  # another engine serves new requests, and reports its state
        self.started: EngineReady | None = None
        self._ranks = Ranks(ranks, config, say)
        initial = adapter_folders(config.serve.adapters) if config.serve.adapters else {}
        self.adapters = AdapterClient(self._ranks.send, initial)
        self._say = say
        self._numbers = count(1)
        self._in_flight: dict[int, _InFlight] = {}
        self._prompt_tokens = 0
        self._liveness = Liveness(frozen_s=config.serve.frozen_s, hung_s=config.serve.hung_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._first_start: asyncio.Future[EngineReady] | None = None
        self._failures = 0
        self._why_down = ""
        self._may_retry_port = True

    # --- interface of the server

    async def start(self) -> EngineReady:
        """Start the engine; ArmillaryError where it cannot start."""
        self._first_start = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]
        self._tasks[0].add_done_callback(self._run_ended)
        return await self._first_start

    async def stop(self) -> None:
        """End the engine; requests in flight fail."""
        self.state = "stopped"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ranks.end()
        self._fail_all("the server is shutting down; try again later")

    @property
    def pid(self) -> int | None:
        """Process id of the first rank; none while no engine runs."""
        return self._ranks.pid

    @property
    def num_requests(self) -> int:
        return len(self._in_flight)

    @property
    def most_prompt_tokens(self) -> int | None:
        """Most prompt tokens in flight; none: not known before the engine has started."""
        return None if self.started is None else self.started.kv_tokens * _MAX_PROMPTS

    def why_not_ready(self) -> str | None:
        """Why no request can be served now; none: the engine is ready."""
        if self.state != "ready":
            return {
                "loading": "the model is being loaded",
                "restarting": "the engine failed and is restarting",
                "down": self._why_down,
                "stopped": "the server is shutting down",
            }[self.state]
        return self._liveness.slow()

    def dead(self) -> str | None:
        """Why only a restart of the server can help; none: an engine runs or is starting."""
        return self.why_not_ready() if self.state in ("down", "stopped") else None

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
        adapter: str = "",
    ) -> int:
        """Send a request whose sequences go to `box` as choices from `choice` on; its number, for `abort`."""
        if self.state != "ready" or not self._ranks.alive:
            raise self.unavailable()
        self._check_admission(len(prompt))
        number = next(self._numbers)
        self._in_flight[number] = _InFlight(box, choice, params.n, len(prompt))
        self._prompt_tokens += len(prompt)
        self._ranks.send(
            Submit(
                number=number,
                prompt=array("i", prompt).tobytes(),
                params=params,
                timeout_s=timeout_s,
                priority=priority,
                salt=salt,
                adapter=adapter,
            )
        )
        return number

    def abort(self, number: int, index: int | None = None) -> None:
        """Abort a request, or the sequence `index` of it, whose text has reached a stop string."""
        if index is None and self._forget(number) is None:
            return
        self._ranks.send(Abort(number=number, index=index))

    def _check_admission(self, tokens: int) -> None:
        """Problem 429 where the prompts in flight, which take host memory, exceed a few times the KV cache."""
        most = self.most_prompt_tokens
        assert most is not None, "an engine that is ready has reported its KV cache"
        if self._in_flight and self._prompt_tokens + tokens > most:
            self.metrics.rejected += 1
            raise Problem(
                429,
                f"prompts of {self._prompt_tokens:,} tokens are in flight, the most that are accepted; try again later",
                code="rate_limit_exceeded",
                retry_after_s=5,
            )

    def _forget(self, number: int) -> _InFlight | None:
        request = self._in_flight.pop(number, None)
        self._prompt_tokens -= request.tokens if request is not None else 0
        return request

    def abort_all(self, message: str) -> None:
        """Abort every request in flight, with `message` as its error."""
        for number in self._in_flight:
            self._ranks.send(Abort(number=number))
        self._fail_all(message)

    def unavailable(self) -> Problem:
        why = self.why_not_ready() or "the engine is not available"
        return Problem(503, f"{why}; try again in a moment", code="engine_unavailable", retry_after_s=2)

    # --- life cycle

    async def _run(self) -> None:
        """Start the engine, read its messages, and restart it when it ends."""
        assert self._first_start is not None, "the client is started once"
        while not (self._first_start.done() and self._first_start.exception()):
            adapters = self.adapters.for_engine
            config = replace(self.config, serve=for_engine(self.config.serve), adapters=adapters)
            self._liveness.heard()
            if self.state == "down":
                self.state = "restarting"
            try:
                reader = await self._ranks.start(config)
                while (message := await read_message(reader)) is not None:
                    self._liveness.heard(message)
                    self._take(message)
            except OSError as error:  # no memory, processes or files now; there may be later
                self._say(f"the engine's process cannot be started ({error.strerror or error})")
            except Exception as error:  # a bug of ours: requests could wait for ever, so the engine restarts
                traceback.print_exc()
                self._say(f"a message of the engine was not understood ({type(error).__name__}: {error}); report this")
            await self._lost()

    async def _lost(self) -> None:
        """The engine has ended: fail its requests, and wait before the next start where starts keep failing."""
        how = exit_text(await self._ranks.end())
        if self.started is None:
            if self._first_start is not None and not self._first_start.done() and not self._another_port():
                text = f"the engine ended while loading ({how}); see the lines above"
                self._first_start.set_exception(BadInput(text))
            return
        self._failures = 0 if self.state == "ready" else self._failures + 1
        self.state = "restarting"
        self.metrics.engine_lost()
        self.metrics.restarts += 1
        self._say(f"the engine ended ({how}); {len(self._in_flight)} requests failed; restarting it")
        self._fail_all("the engine failed while it worked on this request; try again")
        self.adapters.engine_lost()
        if self._failures >= _FAILED_STARTS:
            self._why_down = f"the engine ended ({how}) and failed to restart {self._failures} times in a row"
            self.state = "down"
        await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        """The restart loop has ended: a bug, unless the server is stopping."""
        if self.state == "stopped" or task.cancelled():
            return
        if (error := task.exception()) is not None:
            traceback.print_exception(error)
        self._why_down = "the engine ended and is not restarted; restart the server"
        self.state = "down"
        self._fail_all(self._why_down)

    def _another_port(self) -> bool:
        """Whether to start once more: several ranks rendezvous at a port that was free when they were started, and may
        be in use since."""
        may_retry, self._may_retry_port = self._may_retry_port, False
        return may_retry and self._ranks.count > 1

    async def _watch(self) -> None:
        """Kill an engine that hangs or has lost a rank."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LIVENESS_CHECK_S)
            late_s, checked_at = time.monotonic() - checked_at - _LIVENESS_CHECK_S, time.monotonic()
            if (
                late_s > _LIVENESS_CHECK_S
            ):  # this process was stopped or busy, and has messages of the engine still to read
                self._liveness.excuse(late_s)
            hung = self._liveness.hung() if self.state == "ready" else None
            lost = self._ranks.lost()
            if self._ranks.alive and (hung or lost):
                self._say(f"killing the engine: {hung or lost}")
                self._ranks.kill()
                await asyncio.sleep(1.0)

    def _fail_all(self, message: str) -> None:
        in_flight, self._in_flight, self._prompt_tokens = self._in_flight, {}, 0
        for box in {id(request.box): request.box for request in in_flight.values()}.values():
            box.fail(Problem(503, message, code="engine_failed", retry_after_s=5))

    # --- messages of the engine

    def _take(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            self._take_output(message)
        elif isinstance(message, AdapterResult):
            self.adapters.take(message)
        elif isinstance(message, Refused):
            request = self._forget(message.number)
            if request is not None:
                request.box.fail(self._refusal(message))
        elif isinstance(message, EngineReady):
            self.started, self.state = message, "ready"
            lost = self.adapters.forget(message.lost_adapters)
            if self._first_start is not None and not self._first_start.done():
                if lost:
                    self._first_start.set_exception(BadInput(lost[0]))
                else:
                    self._first_start.set_result(message)
            else:
                for line in lost:
                    self._say(line)
                self._say(f"the engine is ready again after {dict(message.phases)['in all']:.1f} s")
        elif isinstance(message, Failed):
            why = message.message if message.by_user else f"the engine cannot start ({message.message}); report this"
            if self._first_start is None or self._first_start.done() or (not message.by_user and self._ranks.count > 1):
                self._say(why)
            else:
                self._first_start.set_exception(ArmillaryError(why))

    def _refusal(self, message: Refused) -> Problem:
        if not message.overloaded:
            return bad_request(message.message, code=message.code)
        self.metrics.rejected += 1
        return Problem(429, message.message, code=message.code, retry_after_s=5)

    def _take_output(self, output: StepOutput) -> None:
        in_flight, logprobs, now = self._in_flight, output.logprobs, self._liveness.heard_at
        observe = self.metrics.histograms["itl_s"].observe
        for number, prompt in output.prompts.items():
            if number in in_flight:
                in_flight[number].box.prompts[in_flight[number].first] = prompt
        for number, vector in output.pooled.items():
            if number in in_flight:
                in_flight[number].box.pooled[in_flight[number].first] = vector
        for i, (key, token) in enumerate(zip(output.keys, output.tokens, strict=True)):
            request = in_flight.get(key >> INDEX_BITS)
            if request is not None:
                logprob = logprobs.get(i) if logprobs else None
                gap = request.box.token(request.first + (key & _MASK), token, logprob, now)
                if gap is not None:
                    observe(gap)
        for key, finish, error, gauges in output.ends:
            self._end(key, FinishEvent(finish, error, gauges), now)
        if output.state is not None and not self.retired:
            self.metrics.engine_state = output.state

    def _end(self, key: int, end: FinishEvent, now: float) -> None:
        number = key >> INDEX_BITS
        request = self._in_flight.get(number)
        if request is None:
            return
        choice = request.first + (key & _MASK)
        self.metrics.ended(request.box, choice, end.gauges, now, first=not key & _MASK)
        request.box.end(choice, end)
        request.left -= 1
        if not request.left:
            self._forget(number)
