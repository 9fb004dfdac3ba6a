"""The processes of one engine: as many as it has ranks, started together, ended together."""

import asyncio
import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from armillary.serving.http.server import Say
from armillary.serving.processes.engine_ipc import EngineConfig, NodePlace
from armillary.serving.processes.node_ranks import OtherNodes, RankPlace, rank_environment
from armillary.serving.processes.worker_process import frame, spawn

_READ_LIMIT = 1 << 24


class Ranks:
    """The rank processes; rank 0 exchanges messages with the server, the others follow it while their sockets are
    open. Where there are several nodes, the first has the first ranks, and the others start theirs."""

    def __init__(self, count: int, config: EngineConfig, say: Say) -> None:
        self.count = count
        self._module, self._node = config.program, config.nodes
        self._others = OtherNodes(config, count, say) if config.nodes.count > 1 else None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._follower_socks: list[socket.socket] = []
        self._writer: asyncio.StreamWriter | None = None
        self._first: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """Whether rank 0 is connected."""
        return self._writer is not None

    @property
    def pid(self) -> int | None:
        """Process id of rank 0; none where none runs."""
        return self._processes[0].pid if self._processes else None

    def lost(self) -> str:
        """That another rank has ended, for which rank 0 would wait for ever; empty while none has."""
        if any(process.poll() is not None for process in self._processes[1:]):
            return "one of its ranks has ended"
        return self._others.lost if self._others is not None else ""

    async def start(self, config: EngineConfig) -> asyncio.StreamReader:
        """Start the processes; the reader of rank 0's messages."""
        port = _free_port(self._node) if self.count > 1 else 0
        if self._others is not None:
            await self._others.start(port)
        begin = frame(replace(config, asked_at=time.time()))
        first = self._spawn(0, port)
        for rank in range(1, self.count // self._node.count):
            sock = self._spawn(rank, port)
            sock.sendall(begin)
            self._follower_socks.append(sock)
        first.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=first, limit=_READ_LIMIT)
        self._first = first
        self._writer.write(begin)
        return reader

    def _spawn(self, rank: int, port: int) -> socket.socket:
        """Start one process; our end of its socket."""
        process, sock = spawn(self._module, self._environment(rank, port))
        self._processes.append(process)
        return sock

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """The environment of a rank, with torchrun's variables where there are several and without other launchers'."""
        if self.count == 1:
            return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        local = self.count // self._node.count
        place = RankPlace(rank=rank, size=self.count, local_rank=rank, local_size=local, port=port)
        return rank_environment(place, self._node, os.environ)

    def send(self, message: Any) -> None:
        """Send to rank 0 without waiting for it to read, and at once rather than in the event loop's next iteration, so
        that the engine starts while the server prepares the rest of the request."""
        if self._writer is None or self._first is None:
            return
        data, sent = frame(message), 0
        if not self._writer.transport.get_write_buffer_size():
            with suppress(OSError):  # the buffer is full or the process is gone; the writer handles both
                sent = self._first.send(data)
        if sent < len(data):
            self._writer.write(data[sent:])

    def kill(self) -> None:
        """Kill rank 0; its closed socket ends the others."""
        for process in self._processes[:1]:
            process.kill()

    async def end(self) -> int:
        """Kill all processes and wait for them; the exit code of rank 0."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = self._first = None
        if self._others is not None:
            self._others.stop()
        for sock in self._follower_socks:
            sock.close()
        processes, self._processes, self._follower_socks = self._processes, [], []
        for process in processes:
            process.kill()
        codes = [await asyncio.to_thread(process.wait) for process in processes]
        return codes[0] if codes else 0


def _free_port(node: NodePlace) -> int:
    """A port where the first rank can be met, of the first node's address if there are several nodes."""
    with socket.create_server((node.host, 0), reuse_port=False) as probe:
        return int(probe.getsockname()[1])
