"""Requests whose grammar is being compiled outside the engine's loop, with limits of number, time and memory.

Every grammar is first compiled in a process that can be killed (`GrammarSandbox`). One that takes long waits until all
new grammars had a first attempt, so that slow grammars delay other requests by at most one attempt.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from itertools import count

from armillary.engine.output.structured import Structures
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import ArmillaryError, BadInput, Overloaded
from armillary.serving.processes.engine_ipc import Submit
from armillary.serving.processes.grammar_sandbox import CompileTimeout, GrammarSandbox

_ATTEMPT_S = (0.5, 5.0)
"""seconds of CPU time of the first attempt, and of the second, once no grammar waits for its first"""
_MAX_WAITING = 256
_LENGTH_STEP = 4_096
"""characters: among grammars with as many attempts, those shorter by this much go first"""


class GrammarQueue:
    """The queue of compilations and its thread."""

    def __init__(
        self,
        structures: Structures,
        sandbox: GrammarSandbox,
        submit: Callable[[Submit, MakeConstraint], None],
        refuse: Callable[[Submit, ArmillaryError], None],
    ) -> None:
        self._structures, self._sandbox = structures, sandbox
        self._submit, self._refuse = submit, refuse
        self._queue: queue.PriorityQueue[tuple[int, int, int, Submit]] = queue.PriorityQueue()
        self._order = count()
        self._waiting: set[int] = set()  # numbers of queued requests; an aborted request is removed
        # held while a request is checked for an abort and submitted, so that an abort comes before or after both
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, message: Submit) -> None:
        """In the thread that reads the socket."""
        assert message.params.structure is not None
        if self._structures.knows(message.params.structure):
            return self._submit(message, self._structures.maker(message.params.structure))
        with self._lock:
            accepted = len(self._waiting) < _MAX_WAITING
            if accepted:
                self._waiting.add(message.number)
        if not accepted:
            return self._refuse(message, Overloaded("too many grammars wait to be compiled; try again later"))
        self._queue.put((0, len(message.params.structure.source) // _LENGTH_STEP, next(self._order), message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
            self._thread.start()
        return None

    def discard(self, number: int) -> None:
        """A request was aborted."""
        with self._lock:
            self._waiting.discard(number)

    def _run(self) -> None:
        while True:
            self._next(*self._queue.get())

    def _next(self, attempts: int, length: int, order: int, message: Submit) -> None:
        """Attempt one compilation: the request is submitted, refused, or waits for its second attempt."""
        if message.number not in self._waiting:
            return
        try:
            self._compile(message, _ATTEMPT_S[attempts])
        except CompileTimeout as error:
            if attempts + 1 < len(_ATTEMPT_S):
                self._queue.put((attempts + 1, length, order, message))
            else:
                self._end(message, error)
        except ArmillaryError as error:
            self._end(message, error)
        except Exception as error:  # of the compiler: no other thread would see it
            traceback.print_exc()
            self._end(message, BadInput(f"the grammar cannot be used ({type(error).__name__}); make it simpler"))

    def _compile(self, message: Submit, cpu_s: float) -> None:
        structure = message.params.structure
        assert structure is not None
        maker = self._structures.maker(structure)
        if not self._structures.knows(structure):
            self._sandbox.run(structure, cpu_s)
        maker()  # other requests with this grammar find it in the cache
        with self._lock:
            if message.number in self._waiting:
                self._waiting.discard(message.number)
                self._submit(message, maker)

    def _end(self, message: Submit, error: ArmillaryError) -> None:
        self.discard(message.number)
        self._refuse(message, error)
