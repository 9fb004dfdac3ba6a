"""Compiles a grammar in a process that can be killed before the engine's process compiles it: a compilation that never
ends or takes all memory fails one request and no other.

`python -m armillary.serving.processes.grammar_sandbox FD`. That process holds the tokenizer and forks per grammar.
"""

import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from armillary.engine.output.structured import Structures
from armillary.engine.request.constraint import Constraint, Structure
from armillary.errors import ArmillaryError, BadInput
from armillary.serving.processes.worker_process import WorkerProcess, serve_messages

_WALL_FACTOR = 20
"""wall-clock limit of an attempt, in multiples of its CPU time limit"""
_MEMORY_BYTES = 1 << 30
"""memory limit of an attempt, beyond the memory of the tokenizer"""
_MIN_WALL_S = 30.0
_STEPS = 8
"""random tokens that an attempt generates"""
_STEP_S = 0.1
"""CPU time limit per token: a slower grammar would delay every step of the engine"""


class CompileTimeout(BadInput):
    """A grammar that was not compiled within its CPU time."""


class GrammarSandbox:
    """In the engine's process: the client of the sandbox. For one thread at a time."""

    def __init__(self, compiler: Structures) -> None:
        """The sandbox gets a copy of `compiler` with the first structure."""
        self.worker = WorkerProcess("armillary.serving.processes.grammar_sandbox", compiler)

    def run(self, structure: Structure, cpu_s: float) -> None:
        """BadInput where a structure cannot be compiled, CompileTimeout where that takes more than `cpu_s`."""
        result = self.worker.ask((structure, cpu_s))
        if result is None:
            raise BadInput("the grammar could not be compiled; try again")
        kind, text = result
        if kind != "ok":
            raise (CompileTimeout if kind == "timeout" else BadInput)(text)


# --- in the sandbox process


def _prepare(compiler: Structures) -> Callable[[tuple[Structure, float]], tuple[str, str]]:
    """The function that attempts a compilation."""
    with suppress(ArmillaryError):  # reported to the first request
        compiler.maker(Structure(kind="regex", source="a"))()  # builds once what all structures share
    return lambda message: _attempt(compiler, *message)


def _attempt(compiler: Structures, structure: Structure, cpu_s: float) -> tuple[str, str]:
    """(ok | invalid | timeout, why), from a child that is killed at its limits."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _compile(compiler, structure, cpu_s, theirs)
    os.close(theirs)
    report = _read(ours, child, max(_MIN_WALL_S, _WALL_FACTOR * cpu_s))
    os.close(ours)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and report:
        kind, _, text = report.decode().partition(" ")
        return kind, text
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL):
        return "timeout", f"the {structure.kind} takes too long to compile; make it simpler"
    return "invalid", f"the {structure.kind} is too large for the compiler; make it simpler"


def _read(pipe: int, child: int, wall_s: float) -> bytes:
    """The child's report; the child is killed where it does not arrive."""
    report, end = b"", time.monotonic() + wall_s
    while True:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            return b""
        part = os.read(pipe, 65_536)
        if not part:
            return report
        report += part


def _compile(compiler: Structures, structure: Structure, cpu_s: float, pipe: int) -> None:
    """In the child, which ends here: by itself, or by the kernel at its limit of time or memory."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        slow_s = _slowest(compiler.maker(structure)())
        report = (
            "ok " if slow_s <= _STEP_S else f"invalid the {structure.kind} takes too long to follow; make it simpler"
        )
    except ArmillaryError as error:
        report = f"invalid {' '.join(str(error).split())}"
    except BaseException as error:
        report = f"invalid the grammar cannot be used ({type(error).__name__}); make it simpler"
    os.write(pipe, report.encode()[:4000])
    os._exit(0)


def _slowest(constraint: Constraint) -> float:
    """The longest CPU time of a constraint query, over a few random tokens: the engine queries at every step."""
    rng, slowest = Random(0), 0.0
    for _ in range(_STEPS):
        begin = time.process_time()
        bits = int.from_bytes(constraint.allowed(), "little")
        slowest = max(slowest, time.process_time() - begin)
        if not bits or constraint.finished():
            break
        place = rng.randrange(bits.bit_length())
        above = bits >> place << place
        token = (above & -above or bits & -bits).bit_length() - 1
        begin = time.process_time()
        accepted = constraint.advance(token)
        slowest = max(slowest, time.process_time() - begin)
        if not accepted:
            break
    return slowest


if __name__ == "__main__":
    serve_messages(prepare=_prepare)
