"""Structures are tried in a process that can be killed before they are compiled in the engine's: a compiler that never
comes to an end, or takes all memory, costs the request that asked for it and nobody else.

`python -m armillary.serving.processes.grammar_sandbox FD`. That process holds the tokenizer
and forks for every structure.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Protocol

from armillary.engine.request.constraint import Constraint, Structure
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import ArmillaryError, BadInput
from armillary.serving.processes.worker_process import Child, answer_all

_WALL = 20
"""a trial that waits instead of computing is given up after so many times its seconds"""
_MEMORY = 1 << 30
"""bytes that a trial may take beyond what the tokenizer has"""
_FEWEST_WALL_S = 30.0
_STEPS = 8
"""tokens of an answer that a trial makes up"""
_STEP_S = 0.1
"""a structure that takes longer for one of them would hold up the answers of others at every step"""


class TooLong(BadInput):
    """A structure that was not compiled within its time."""


class Compiler(Protocol):
    """What makes constraints of structures."""

    def maker(self, structure: Structure) -> MakeConstraint: ...


class Trials:
    """In the engine's process: asks the other one. For one thread at a time."""

    def __init__(self, compiler: Compiler) -> None:
        """The other process gets a copy of `compiler`, when the first structure comes."""
        self.child = Child("armillary.serving.processes.grammar_sandbox", compiler)

    def run(self, structure: Structure, cpu_s: float) -> None:
        """BadInput where a structure cannot be compiled, TooLong where that takes more than `cpu_s`."""
        found = self.child.ask((structure, cpu_s))
        if found is None:
            raise BadInput("the structure could not be tried; ask again")
        kind, text = found
        if kind != "fits":
            raise (TooLong if kind == "late" else BadInput)(text)


# --- in the other process


def main() -> None:
    compiler: Compiler | None = None

    def prepare(inbox: Iterator[Any]) -> None:
        nonlocal compiler
        compiler = next(inbox, None) or sys.exit(0)
        with suppress(ArmillaryError):  # said to whoever asks
            compiler.maker(Structure(kind="regex", source="a"))()  # what all of them need is made once

    def answer(message: tuple[Structure, float]) -> tuple[str, str]:
        assert compiler is not None
        return _tried(compiler, *message)

    answer_all(answer, prepare)


def _tried(compiler: Compiler, structure: Structure, cpu_s: float) -> tuple[str, str]:
    """(fits | wrong | late, why), from a child that is killed where it takes too much."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _compile(compiler, structure, cpu_s, theirs)
    os.close(theirs)
    told = _read(ours, child, max(_FEWEST_WALL_S, _WALL * cpu_s))
    os.close(ours)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and told:
        kind, _, text = told.decode().partition(" ")
        return kind, text
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL):
        return "late", f"the {structure.kind} takes too long to compile; make it simpler"
    return "wrong", f"the {structure.kind} is more than the compiler can take; make it simpler"


def _read(pipe: int, child: int, wall_s: float) -> bytes:
    """All that the child says; it is ended where that does not come."""
    found, end = b"", time.monotonic() + wall_s
    while True:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            return b""
        part = os.read(pipe, 65_536)
        if not part:
            return found
        found += part


def _compile(compiler: Compiler, structure: Structure, cpu_s: float, pipe: int) -> None:
    """In the child, which ends here: by itself, or by the kernel when its time or memory is used up."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        slow_s = _slowest(compiler.maker(structure)())
        told = "fits " if slow_s <= _STEP_S else f"wrong the {structure.kind} takes too long to follow; make it simpler"
    except ArmillaryError as error:
        told = f"wrong {' '.join(str(error).split())}"
    except BaseException as error:
        told = f"wrong the structure cannot be used ({type(error).__name__}); make it simpler"
    os.write(pipe, told.encode()[:4000])
    os._exit(0)


def _slowest(constraint: Constraint) -> float:
    """The longest CPU time that one of the first tokens of an answer took: engines ask at every step."""
    dice, slowest = Random(0), 0.0
    for _ in range(_STEPS):
        begin = time.process_time()
        bits = int.from_bytes(constraint.allowed(), "little")
        slowest = max(slowest, time.process_time() - begin)
        if not bits or constraint.finished():
            break
        place = dice.randrange(bits.bit_length())
        above = bits >> place << place
        token = (above & -above or bits & -bits).bit_length() - 1
        begin = time.process_time()
        goes_on = constraint.advance(token)
        slowest = max(slowest, time.process_time() - begin)
        if not goes_on:
            break
    return slowest


if __name__ == "__main__":
    main()
