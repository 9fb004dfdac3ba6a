"""Structures on their way to the engine: slow ones wait for quick ones, exploding ones are killed."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from armillary.engine.request.constraint import Structure
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import ArmillaryError, BadInput, Overloaded
from armillary.serving.processes import grammar_queue
from armillary.serving.processes.engine_ipc import Submit
from armillary.serving.processes.grammar_queue import GrammarQueue
from armillary.serving.processes.grammar_sandbox import CompileTimeout, GrammarSandbox


class Fits:
    """A constraint that allows the tokens 1 and 12 three times, the last time after some work."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.work_s = work_s
        self.tokens: list[int] = []

    def allowed(self) -> bytes:
        end = time.process_time() + (self.work_s if len(self.tokens) == 2 else 0.0)
        while time.process_time() < end:
            pass
        return b"\x02\x10\x00"

    def advance(self, token: int) -> bool:
        assert token in (1, 12)
        self.tokens.append(token)
        return True

    def finished(self) -> bool:
        return len(self.tokens) == 3


class Actor:
    """Stands in for the compiler: does what the structure's source says."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def knows(self, structure: Structure) -> bool:
        return structure.source in self.made

    def maker(self, structure: Structure) -> Any:
        return lambda: self.act(structure.source)

    def act(self, source: str) -> Fits:
        while source == "loop":
            pass
        if source == "memory":
            raise MemoryError(len(bytearray(4 << 30)))
        if source == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if source == "wrong":
            raise BadInput("the regex cannot be read; correct it")
        if source == "broken":
            raise ValueError("the compiler's own")
        self.made.add(source)
        return Fits(0.3 if source == "follow" else 0.0)


def structure(source: str) -> Structure:
    return Structure(kind="regex", source=source)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(Actor())
    yield made
    made.worker.close()


def test_a_structure_that_compiles_passes(sandbox: GrammarSandbox) -> None:
    sandbox.run(structure("fits"), 5.0)


@pytest.mark.parametrize(
    "source, words",
    [
        ("wrong", "cannot be read; correct it"),
        ("broken", "cannot be used"),
        ("loop", "takes too long to compile"),
        ("follow", "takes too long to follow"),
        ("memory", "make it simpler"),
        ("crash", "too large for the compiler"),
    ],
)
def test_what_a_structure_does_to_the_compiler_ends_with_it(sandbox: GrammarSandbox, source: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as found:
        sandbox.run(structure(source), 0.2 if source == "loop" else 5.0)
    assert isinstance(found.value, CompileTimeout) == (source == "loop")
    sandbox.run(structure("fits"), 5.0)  # the process is still there, and answers the right question


def test_a_process_that_was_killed_is_started_again(sandbox: GrammarSandbox) -> None:
    sandbox.run(structure("fits"), 5.0)
    first = sandbox.worker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    sandbox.run(structure("fits"), 5.0)
    assert sandbox.worker.pid != first


class Clock:
    """Stands in for the trials: a structure says what it takes, and `gate` when one of them may be tried."""

    def __init__(self) -> None:
        self.gate: queue.Queue[None] = queue.Queue()
        self.seen: list[tuple[str, float]] = []

    def run(self, structure: Structure, cpu_s: float) -> None:
        self.gate.get(timeout=20)
        self.seen.append((structure.source, cpu_s))
        if float(structure.source) > cpu_s:
            raise CompileTimeout("the regex takes too long to compile; make it simpler")


class Desk:
    """A queue with what came of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ended: queue.Queue[tuple[int, ArmillaryError | None]] = queue.Queue()
        self.grammars = GrammarQueue(
            Actor(),
            self.clock,
            lambda one, maker: self.ended.put((one.number, None)),
            lambda one, error: self.ended.put((one.number, error)),
        )

    def ask(self, number: int, source: str) -> None:
        params = SamplingParams(structure=structure(source))
        self.grammars.take(Submit(number=number, prompt=b"", params=params, timeout_s=None))

    def ends(self, count: int) -> list[tuple[int, ArmillaryError | None]]:
        return [self.ended.get(timeout=20) for _ in range(count)]


def test_slow_ones_wait_until_new_ones_had_their_turn_and_endless_ones_are_refused() -> None:
    desk = Desk()
    for number, source in enumerate(["99", "3", "0.1", "98", "0.2"]):
        desk.ask(number, source)
    for _ in range(8):
        desk.clock.gate.put(None)
    found = desk.ends(5)
    assert [number for number, _ in found] == [2, 4, 0, 1, 3]
    assert [number for number, error in found if isinstance(error, CompileTimeout)] == [0, 3]
    assert [source for source, _ in desk.clock.seen] == ["99", "3", "0.1", "98", "0.2", "99", "3", "98"]


def test_short_ones_go_before_long_ones() -> None:
    desk = Desk()
    for number, source in enumerate(["0.1", "0.1" + "0" * 50_000, "0.1" + "0" * 10_000, "0.2"]):
        desk.ask(number, source)
    for _ in range(4):
        desk.clock.gate.put(None)
    assert [number for number, _ in desk.ends(4)] in ([0, 3, 2, 1], [3, 0, 2, 1])


def test_one_that_is_known_does_not_wait() -> None:
    desk = Desk()
    desk.grammars._structures.maker(structure("0.1"))()
    desk.ask(1, "99")
    desk.ask(2, "0.1")
    assert desk.ends(1) == [(2, None)]


def test_more_than_may_wait_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "_MAX_WAITING", 2)
    desk = Desk()
    for number in range(3):
        desk.ask(number, f"0.{number}1")
    ((number, error),) = desk.ends(1)
    assert number == 2 and isinstance(error, Overloaded)
    desk.grammars.discard(1)  # its client left: there is room again, and it never comes to the engine
    desk.ask(3, "0.4")
    for _ in range(3):
        desk.clock.gate.put(None)
    assert desk.ends(2) == [(0, None), (3, None)]


def test_a_compiler_that_breaks_is_told_to_the_request_and_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    desk = Desk()
    desk.ask(7, "broken")  # no number: the stand-in for the trials fails as a compiler would
    desk.clock.gate.put(None)
    ((number, error),) = desk.ends(1)
    assert number == 7 and "make it simpler" in str(error) and "ValueError" in capfd.readouterr().err
