"""A child process that answers one message at a time, for work that would hold the GIL or might never end.

It runs `python -m MODULE FD`, is started with the first message and again after its death, and ends when our end of its
socket is closed.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from armillary.serving.processes.engine_ipc import frame, messages


class WorkerProcess:
    """The parent's end; for one thread at a time."""

    def __init__(self, module: str, *first: Any) -> None:
        """`first` are messages that every new process gets first, and does not answer."""
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._replies: Generator[Any, None, None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, message: Any) -> Any:
        """The process's reply to a message; None where it died."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._sock is not None and self._replies is not None
        with suppress(OSError):  # it has just died, which the next line notices
            self._sock.sendall(frame(message))
        reply = next(self._replies, None)
        if reply is None:
            self.close()
        return reply

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._sock is not None and self._replies is not None:
            self._replies.close()  # it holds the socket's file object
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
        self._replies = messages(self._sock)
        for message in self._first:
            self._sock.sendall(frame(message))


def serve_messages(reply: Callable[[Any], Any], prepare: Callable[[Iterator[Any]], None] | None = None) -> None:
    """In the child: `prepare` reads the first messages, `reply` is called for each of the others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the child ends when its socket is closed
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox = messages(sock)
    if prepare is not None:
        prepare(inbox)
    for message in inbox:
        sock.sendall(frame(reply(message)))
