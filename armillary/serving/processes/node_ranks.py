"""Ranks of one engine on several nodes.

The first node has the server. It says when ranks start and at which port they meet; on every other node a process
starts its share of them, and says when one has ended. Messages are lines of JSON over TCP; like the ranks' own
connections they are neither encrypted nor authenticated, so they belong on the network of a cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from armillary.machine.network_route import route_to
from armillary.serving.http.server import Say
from armillary.serving.processes.engine_ipc import EngineConfig, NodePlace
from armillary.serving.processes.worker_process import exit_text, frame, spawn

_CONNECT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.2
_HELLO_S = 5.0
_MOST_LINE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank of `size` in all, and one of `local_size` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int


def rank_environment(rank: RankPlace, node: NodePlace, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank's process: torchrun's variables, without those of other launchers, and gloo on the
    interface that leads to the first node."""
    values: dict[str, Any] = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.local_rank,
        "WORLD_SIZE": rank.size,
        "LOCAL_WORLD_SIZE": rank.local_size,
        "MASTER_ADDR": node.host,
        "MASTER_PORT": rank.port,
    }
    if node.count > 1:
        interface = route_to(node.host, is_host=node.rank == 0).interface
        values |= {"GLOO_SOCKET_IFNAME": inherited.get("GLOO_SOCKET_IFNAME", interface)} if interface else {}
    inherited = {name: value for name, value in inherited.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return inherited | {name: str(value) for name, value in values.items()}


class OtherNodes:
    """On the first node: the connections of the others, over all starts of the engine."""

    def __init__(self, node: NodePlace, say: Say) -> None:
        self._node, self._say = node, say
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._start = 0
        self.lost = ""
        """why the engine that was started last has lost ranks of another node"""

    async def start(self, port: int) -> None:
        """Have ranks started on every other node, once all are connected."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, self._node.host, self._node.port)
        await self._all_connected()
        self._start, self.lost = self._start + 1, ""
        self._send({"start": self._start, "port": port})

    def stop(self) -> None:
        """Have the ranks of the other nodes ended."""
        self._send({"start": 0})

    async def _all_connected(self) -> None:
        said = ""
        while missing := [rank for rank in range(1, self._node.count) if rank not in self._writers]:
            text = f"waiting for node {', '.join(map(str, missing))} of {self._node.count}"
            if text != said:
                self._say(f"{text} at {self._node.host}:{self._node.port}: start the same command there")
                said = text
            self._changed.clear()
            await self._changed.wait()

    def _send(self, message: dict[str, int]) -> None:
        for writer in self._writers.values():
            writer.write(_line(message))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = 0
        with suppress(OSError, ValueError, asyncio.TimeoutError):
            rank = int(_message(await asyncio.wait_for(reader.readline(), _HELLO_S)).get("node", 0))
        if not 0 < rank < self._node.count:
            writer.close()
            return
        if (before := self._writers.get(rank)) is not None:  # its end has not been noticed yet
            before.close()
            self.lost = f"node {rank} has started again"
        self._writers[rank] = writer
        self._changed.set()
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                message = _message(line)
                if message.get("lost") == self._start:
                    self.lost = f"a rank of node {rank} has ended ({message.get('why')})"
        if self._writers.get(rank) is writer:
            del self._writers[rank]
            self.lost = self.lost or f"node {rank} has gone away"
        writer.close()


def serve_node(config: EngineConfig, ranks: int, say: Say) -> None:
    """On every other node: its share of `ranks`, whenever the first node starts an engine, until this process ends."""
    node, started = config.nodes, _LocalRanks(config, ranks)
    try:
        while True:
            say(f"node {node.rank} of {node.count}: connecting to {node.host}:{node.port}")
            with _connected_to(node, say) as sock:
                sock.sendall(_line({"node": node.rank}))
                say(f"node {node.rank} of {node.count}: ranks start when the first node says so")
                _obey(sock, started, say)
            say("the first node has gone away")
    finally:
        started.end()


class _LocalRanks:
    """The rank processes of this node."""

    def __init__(self, config: EngineConfig, ranks: int) -> None:
        self._config, self._size = config, ranks
        self._local = ranks // config.nodes.count
        self._processes: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self.number = 0
        """of the start that they belong to; 0: none runs"""

    def start(self, number: int, port: int) -> None:
        self.end()
        node, begin = self._config.nodes, frame(replace(self._config, asked_at=time.time()))
        for local in range(self._local):
            place = RankPlace(
                rank=node.rank * self._local + local,
                size=self._size,
                local_rank=local,
                local_size=self._local,
                port=port,
            )
            process, sock = spawn(self._config.program, rank_environment(place, node, os.environ))
            self._processes.append((process, sock))
            sock.sendall(begin)
        self.number = number

    def ended(self) -> str:
        """How one of them ended; empty while all run."""
        codes = [process.poll() for process, _ in self._processes]
        return next((exit_text(code) for code in codes if code is not None), "")

    def end(self) -> None:
        for process, sock in self._processes:
            sock.close()
            process.kill()
        for process, _ in self._processes:
            process.wait()
        self._processes, self.number = [], 0


def _obey(sock: socket.socket, ranks: _LocalRanks, say: Say) -> None:
    """Until the connection ends, and the ranks with it."""
    pending = b""
    with suppress(OSError):
        while True:
            if select.select([sock], [], [], _LOOK_EVERY_S)[0]:
                data = sock.recv(4096)
                if not data or len(pending) > _MOST_LINE:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for message in map(_message, lines):
                    if message.get("start"):
                        say("starting ranks")
                        ranks.start(int(message["start"]), int(message["port"]))
                    else:
                        ranks.end()
            elif ranks.number and (how := ranks.ended()):
                number = ranks.number
                ranks.end()
                say(f"a rank has ended ({how}); waiting for the next start")
                sock.sendall(_line({"lost": number, "why": how}))
    ranks.end()


def _connected_to(node: NodePlace, say: Say) -> socket.socket:
    """A connection to the first node, as soon as it listens; why there is none yet is said once."""
    said = ""
    while True:
        try:
            sock = socket.create_connection((node.host, node.port), timeout=_HELLO_S)
        except OSError as error:
            why = error.strerror or str(error)
            if why != said:
                say(f"not connected yet ({why}); trying again until the first node listens")
                said = why
            time.sleep(_CONNECT_EVERY_S)
            continue
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message
