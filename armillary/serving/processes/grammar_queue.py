"""Requests whose structure is being compiled, beside the engine's loop: bounded in number, time and memory.

Every structure is tried in a process that can be killed (`trials`). One that is not done quickly waits until all new
ones had their try, so that whoever sends slow ones makes nobody else wait longer than one of them takes.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from itertools import count
from typing import Protocol

from armillary.engine.request.constraint import Structure
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import ArmillaryError, BadInput
from armillary.serving.processes.engine_ipc import Submit
from armillary.serving.processes.grammar_sandbox import Compiler, TooLong

_TRY_S = (0.5, 5.0)
"""seconds of CPU time that a structure may take: the first time, and once nobody else waits for their first"""
_MOST = 256
"""requests that may wait for this"""
_SHORT = 4_096
"""characters: of those that had as many tries, the ones shorter by so much go first"""


class Busy(ArmillaryError):
    """Too many structures wait to be compiled."""


class Knowing(Compiler, Protocol):
    """A compiler that keeps what it made."""

    def knows(self, structure: Structure) -> bool: ...


class Trying(Protocol):
    """Says whether a structure can be compiled, in bounded time."""

    def run(self, structure: Structure, cpu_s: float) -> None: ...


class Compiling:
    """A queue, and the thread that works it off."""

    def __init__(
        self,
        structures: Knowing,
        trials: Trying,
        submit: Callable[[Submit, MakeConstraint], None],
        refuse: Callable[[Submit, ArmillaryError], None],
    ) -> None:
        self._structures, self._trials = structures, trials
        self._submit, self._refuse = submit, refuse
        self._queue: queue.PriorityQueue[tuple[int, int, int, Submit]] = queue.PriorityQueue()
        """by tries, length and arrival"""
        self._order = count()
        self._waiting: set[int] = set()
        """requests that are not with the engine yet; those that were given up meanwhile are taken out"""
        self._handing = threading.Lock()
        """held to look whether one was given up, and to hand it over: an abort comes before or after that"""
        self._thread: threading.Thread | None = None

    def take(self, message: Submit) -> None:
        """In the thread that reads the socket."""
        assert message.params.structure is not None
        if self._structures.knows(message.params.structure):
            return self._submit(message, self._structures.maker(message.params.structure))
        with self._handing:
            room = len(self._waiting) < _MOST
            if room:
                self._waiting.add(message.number)
        if not room:
            return self._refuse(message, Busy("too many structures wait to be compiled; try again later"))
        self._queue.put((0, len(message.params.structure.source) // _SHORT, next(self._order), message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
            self._thread.start()
        return None

    def give_up(self, number: int) -> None:
        """Nobody waits for a request any more."""
        with self._handing:
            self._waiting.discard(number)

    def _run(self) -> None:
        while True:
            self._next(*self._queue.get())

    def _next(self, tries: int, length: int, place: int, message: Submit) -> None:
        """Try one: it goes to the engine, is refused, or waits for its second try."""
        if message.number not in self._waiting:
            return
        try:
            self._compile(message, _TRY_S[tries])
        except TooLong as error:
            if tries + 1 < len(_TRY_S):
                self._queue.put((tries + 1, length, place, message))
            else:
                self._end(message, error)
        except ArmillaryError as error:
            self._end(message, error)
        except Exception as error:  # of the compiler: in this thread nobody else would hear of it
            traceback.print_exc()
            self._end(message, BadInput(f"the structure cannot be used ({type(error).__name__}); make it simpler"))

    def _compile(self, message: Submit, cpu_s: float) -> None:
        structure = message.params.structure
        assert structure is not None
        maker = self._structures.maker(structure)
        if not self._structures.knows(structure):
            self._trials.run(structure, cpu_s)
        maker()  # others with the same structure find it compiled
        with self._handing:
            if message.number in self._waiting:
                self._waiting.discard(message.number)
                self._submit(message, maker)

    def _end(self, message: Submit, error: ArmillaryError) -> None:
        self.give_up(message.number)
        self._refuse(message, error)
