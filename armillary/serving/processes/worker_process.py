"""Child processes, and the messages between them and us: pickled, one per frame, over a socket pair.

A child is `python -m MODULE FD`, and ends when our end of its socket is closed. A `WorkerProcess` answers one message
at a time, for work that would hold the GIL or might never end.
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

Reply = Callable[[Any], Any]
_HEAD = struct.Struct("<I")


def frame(message: Any) -> bytes:
    """A message as a frame: its length and its pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


async def read_message(reader: StreamReader) -> Any:
    """The next message; None where the other end is closed."""
    try:
        (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return pickle.loads(await reader.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None


def messages(sock: socket.socket) -> Generator[Any, None, None]:
    """Messages until the other end is closed."""
    with sock.makefile("rb") as file:
        while (body := _body(file)) is not None:
            yield pickle.loads(body)


def _body(file: BinaryIO) -> bytes | None:
    """Body of the next frame; a connection reset counts as the end too."""
    with suppress(ConnectionError):
        if len(head := file.read(_HEAD.size)) == _HEAD.size:
            (length,) = _HEAD.unpack(head)
            body = file.read(length)
            return body if len(body) == length else None
    return None


def spawn(module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child that runs `module` with our search path for imports, and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return process, ours


def exit_text(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class WorkerProcess:
    """The parent's end, for one thread at a time. The process starts with the first message, and again after its
    death."""

    def __init__(self, module: str, *first: Any) -> None:
        """`first`: the messages that every new process gets before others."""
        self._module = module
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._replies: Generator[Any, None, None] | None = None
        self.last_exit_code = 0

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

    def kill(self) -> None:
        """Kill the process, while another thread may wait for its reply."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._sock is not None and self._replies is not None:
            self._replies.close()  # it holds the socket's file object
            self._sock.close()
            self._process.kill()
            self.last_exit_code = self._process.wait()
        self._process = self._sock = None

    def _start(self) -> None:
        self.close()
        self._process, self._sock = spawn(self._module, os.environ)
        self._replies = messages(self._sock)
        for message in self._first:
            self._sock.sendall(frame(message))
            next(self._replies, None)


def serve_messages(reply: Reply | None = None, prepare: Callable[[Any], Reply] | None = None) -> None:
    """In the child: answer each message by `reply`, or by the function that `prepare` makes of the first message."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the child ends when its socket is closed
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox = messages(sock)
    if prepare is not None and (first := next(inbox, None)) is not None:
        reply = prepare(first)
        sock.sendall(frame(True))
    for message in inbox:
        assert reply is not None, "the child has a function that answers messages"
        sock.sendall(frame(reply(message)))
