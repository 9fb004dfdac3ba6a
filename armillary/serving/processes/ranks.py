"""The processes of one engine: as many as it has ranks, started together, ended together."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from armillary.serving.processes.engine_ipc import Orders, frame

_MOST_BUFFERED = 1 << 24


class Ranks:
    """Running processes; the first one is talked to, the others follow it."""

    def __init__(self, count: int, module: str = "armillary.serving.processes.engine_main") -> None:
        """`module` is the program that each of them runs."""
        self.count = count
        self._module = module
        self._processes: list[subprocess.Popen[bytes]] = []
        self._socks: list[socket.socket] = []
        """of those that follow: open as long as they are wanted"""
        self._writer: asyncio.StreamWriter | None = None
        self._first: socket.socket | None = None
        """what the writer writes to"""

    @property
    def alive(self) -> bool:
        """Whether there is somebody to talk to."""
        return self._writer is not None

    @property
    def pid(self) -> int | None:
        """Of the first one; none where none runs."""
        return self._processes[0].pid if self._processes else None

    def lost_one(self) -> bool:
        """Whether a rank that follows has ended, without which the first one waits for ever."""
        return any(process.poll() is not None for process in self._processes[1:])

    async def start(self, orders: Orders) -> asyncio.StreamReader:
        """Start them; where the first one's messages come from."""
        port = _free_port() if self.count > 1 else 0
        begin = frame(replace(orders, asked_at=time.time()))
        first = self._spawn(0, port)
        for rank in range(1, self.count):
            sock = self._spawn(rank, port)
            sock.sendall(begin)
            self._socks.append(sock)
        first.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=first, limit=_MOST_BUFFERED)
        self._first = first
        self._writer.write(begin)
        return reader

    def _spawn(self, rank: int, port: int) -> socket.socket:
        """One process, and our end of its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=self._environment(rank, port),
                )
            )
        return ours

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """torchrun's variables, where there are several ranks; other launchers' are not for us."""
        found = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            found.pop(key, None)
        if self.count > 1:
            found |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.count),
                "LOCAL_WORLD_SIZE": str(self.count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        return found

    def send(self, message: Any) -> None:
        """To the first one; nobody waits for it to read. It goes out now, not when the event loop comes round: the
        engine begins while the rest of the request is made ready."""
        if self._writer is None or self._first is None:
            return
        data, sent = frame(message), 0
        if not self._writer.transport.get_write_buffer_size():
            with suppress(OSError):  # no room, or nobody there: the writer finds out
                sent = self._first.send(data)
        if sent < len(data):
            self._writer.write(data[sent:])

    def kill(self) -> None:
        """End the first one: its socket tells those who listen."""
        for process in self._processes[:1]:
            process.kill()

    async def end(self) -> int:
        """End all, and wait until their memory is free; how the first one ended."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = self._first = None
        for sock in self._socks:
            sock.close()
        processes, self._processes, self._socks = self._processes, [], []
        for process in processes:
            process.kill()
        codes = [await asyncio.to_thread(process.wait) for process in processes]
        return codes[0] if codes else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
