"""The engine with and without a thread: everybody gets their own answer, and only theirs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from armillary.engine.engine import Completion, Engine
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputDelta, OutputProcessor
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.step_loop import Loop, StepFailed
from armillary.errors import BadInput
from armillary.spec.gauges import GAUGES
from tests.engine.fake import FakeExecutor, ask, expected, make_scheduler
from tests.engine.output.test_output_text import Letters

WAIT_S = 30.0


class Fragile(FakeExecutor):
    """Fails in the steps of `broken`, and can be slow."""

    broken: tuple[int, ...] = ()
    error: type[Exception] = StepFailed
    slow_s = 0.0

    def launch(self, decision: Decision) -> list[int]:
        time.sleep(self.slow_s)
        if self.launched + 1 in self.broken:
            self.launched += 1
            raise self.error("the device ran out of memory; lower serve.kv_bytes")
        return super().launch(decision)


def make_engine(record: Any = None, overlap: bool = True, **settings: Any) -> Engine:
    scheduler = make_scheduler(num_blocks=40, **settings)
    loop = Loop(scheduler, Fragile(scheduler.cache, scheduler.settings.max_running), overlap=overlap)
    return Engine(loop, OutputProcessor(scheduler, Letters), record=record)


@pytest.fixture
def worker() -> Iterator[EngineThread]:
    made = EngineThread(make_engine()).start()
    yield made
    made.stop()
    check_idle(made.engine.scheduler)


class Inbox:
    """Collects one request's deltas."""

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self.over = threading.Event()

    def __call__(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self.over.set()

    def completion(self) -> Completion:
        assert self.over.wait(WAIT_S)
        made = Completion(request=self.deltas[0].sequence.request)
        for delta in self.deltas:
            made.add(delta)
        return made


@pytest.mark.parametrize("batching", ["none", "static", "dynamic", "continuous"])
def test_generate_answers_in_order_and_says_what_is_wrong_with_one(batching: str) -> None:
    engine = make_engine(batching=batching, batch_window_s=0.01)
    wanted = [ask("a", [2, 3], 6), ask("b", [], 6), ask("c", [4, 5], 6, n=2), ask("d", [99], 6)]
    found = engine.generate(wanted)
    assert [(made.request.id, made.index, bool(made.error)) for made in found] == [
        ("a", 0, False),
        ("b", 0, True),
        ("c", 0, False),
        ("c", 1, False),
        ("d", 0, True),
    ]
    assert all(made.tokens == expected(made.request, made.index) for made in found if not made.error)
    assert "empty" in found[1].error and "token 99" in found[4].error
    check_idle(engine.scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_only_what_was_in_it(overlap: bool) -> None:
    engine = make_engine(overlap=overlap, max_running=2)
    engine.loop.executor.broken = (3,)
    found = engine.generate([ask(name, [ord(name) - 90, 3], 8, ignore_eos=True) for name in "abcd"])
    assert [made.finish for made in found] == ["error", "error", "length", "length"]
    assert "lower serve.kv_bytes" in found[0].error
    assert all(made.tokens == expected(made.request, eos=None)[: len(made.tokens)] for made in found)


def test_every_step_and_request_is_recorded() -> None:
    records: list[tuple[dict[str, float], dict[str, Any]]] = []
    engine = make_engine(lambda gauges, **of: records.append((gauges, of)))
    engine.generate([ask("a", [2, 3, 4], 5, ignore_eos=True), ask("b", [5, 6], 3, ignore_eos=True)])
    requests = {of["request"]: gauges for gauges, of in records if "request" in of}
    assert {name: gauges["tokens_out"] for name, gauges in requests.items()} == {"a": 5, "b": 3}
    steps = [gauges for gauges, of in records if "step" in of]
    assert sum(gauges["decode_tokens"] for gauges in steps) == 4 + 2
    assert all(set(gauges) <= set(GAUGES) for gauges, _ in records)
    assert all(gauges["engine_schedule_s"] <= gauges["engine_step_s"] for gauges in steps)


def test_many_threads_get_their_own_answers(worker: EngineThread) -> None:
    wanted = [ask(f"r{i}", [2 + i % 7, 3 + i % 5, 4], 6) for i in range(24)]
    inboxes = {request.id: Inbox() for request in wanted}

    def client(mine: list[Any]) -> None:
        for request in mine:
            worker.submit(request, inboxes[request.id])

    clients = [threading.Thread(target=client, args=(wanted[i::4],)) for i in range(4)]
    for one in clients:
        one.start()
    for request in wanted:
        assert inboxes[request.id].completion().tokens == expected(request)
    for one in clients:
        one.join()
    assert worker.quiet_s() < WAIT_S


def test_streams(worker: EngineThread) -> None:
    async def tokens(name: str) -> list[int]:
        return [token async for delta in worker.stream(ask(name, [3, ord(name) - 90], 6)) for token in delta.tokens]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(tokens(name) for name in "abc"))

    wanted = [ask(name, [3, ord(name) - 90], 6) for name in "abc"]
    assert asyncio.run(asyncio.wait_for(all_of_them(), WAIT_S)) == [expected(request) for request in wanted]


def test_a_client_that_leaves_takes_its_request_along(worker: EngineThread) -> None:
    worker.engine.loop.executor.slow_s = 0.01

    async def leave() -> int:
        stream = worker.stream(ask("a", [2, 3], 50, ignore_eos=True))
        first = await anext(stream)
        await stream.aclose()
        return len(first.tokens)

    assert asyncio.run(asyncio.wait_for(leave(), WAIT_S)) == 1
    end = time.monotonic() + WAIT_S
    while worker.engine.scheduler.totals.aborted == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert worker.engine.scheduler.totals.aborted == 1


def test_bad_requests_are_told_and_names_can_be_used_again(worker: EngineThread) -> None:
    with pytest.raises(BadInput, match="empty"):
        worker.submit(ask("a", []), Inbox())
    worker.engine.loop.executor.slow_s = 0.005
    first, second = Inbox(), Inbox()
    worker.submit(ask("a", [2, 3], 30, ignore_eos=True), first)
    worker.submit(ask("a", [2, 3], 4), second)
    assert "is here already" in second.completion().error
    assert first.completion().finish == "length"
    third = Inbox()
    worker.submit(ask("a", [2, 3], 4), third)
    assert third.completion().tokens == expected(ask("a", [2, 3], 4))


@pytest.mark.parametrize("drain_s", [0.0, WAIT_S])
def test_stopping_drains_or_gives_up(drain_s: float) -> None:
    worker = EngineThread(make_engine()).start()
    worker.engine.loop.executor.slow_s = 0.005
    inbox = Inbox()
    worker.submit(ask("a", [2, 3], 40, ignore_eos=True), inbox)
    worker.stop(drain_s=drain_s)
    assert inbox.completion().finish == ("length" if drain_s else "abort")
    with pytest.raises(BadInput, match="stopping"):
        worker.submit(ask("b", [2]), inbox)
    check_idle(worker.engine.scheduler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_tells_those_who_wait() -> None:
    worker = EngineThread(make_engine())
    worker.engine.loop.executor.broken, worker.engine.loop.executor.error = (2,), ZeroDivisionError
    inbox = Inbox()
    worker.submit(ask("a", [2, 3], 40), inbox)
    worker.start()
    made = inbox.completion()
    assert made.finish == "error" and "ZeroDivisionError" in made.error and made.error.endswith("restart it")
    worker.stop()
    assert isinstance(worker.failure, ZeroDivisionError)
    with pytest.raises(BadInput, match="stopping"):
        worker.submit(ask("b", [2]), inbox)
