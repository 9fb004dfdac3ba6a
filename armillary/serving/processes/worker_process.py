"""A process of our own that answers one message at a time: for work that would hold the interpreter, or never end.

It is started when it is first asked, and again where it died. It runs `python -m MODULE FD`, reads its messages with
`channel.messages`, and ends when our end of its socket is closed, however that came about.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from armillary.serving.processes.engine_ipc import frame, messages


class Child:
    """Our end; for one thread at a time."""

    def __init__(self, module: str, *first: Any) -> None:
        """`first` are messages that every new process gets before all others, and does not answer."""
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._answers: Generator[Any, None, None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, message: Any) -> Any:
        """Its answer; None where it died over it."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._sock is not None and self._answers is not None
        with suppress(OSError):  # it has just died: that shows below
            self._sock.sendall(frame(message))
        found = next(self._answers, None)
        if found is None:
            self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._sock is not None and self._answers is not None:
            self._answers.close()  # it holds the socket's file
            self._sock.close()
            self._process.kill()
            self._process.wait()
        self._process = self._sock = None

    def _start(self) -> None:
        self.close()
        self._sock, theirs = socket.socketpair()
        with theirs:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
        self._answers = messages(self._sock)
        for message in self._first:
            self._sock.sendall(frame(message))


def answer_all(answer: Callable[[Any], Any], prepare: Callable[[Iterator[Any]], None] | None = None) -> None:
    """In that process: `prepare` takes its first messages, `answer` is called for all others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # our end is the socket's
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox = messages(sock)
    if prepare is not None:
        prepare(inbox)
    for message in inbox:
        sock.sendall(frame(answer(message)))
