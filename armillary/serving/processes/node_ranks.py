"""Ranks of one engine on several nodes.

The first node has the server. It says when ranks start and at which port they meet; on every other node a process
starts its share of them, and says when one has ended. The messages (node_messages.py) are, like the ranks' own
connections, neither encrypted nor authenticated, so they belong on the network of a cluster.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from armillary import __version__
from armillary.errors import BadInput
from armillary.machine.network_route import route_to
from armillary.serving.http.server import Say
from armillary.serving.processes.engine_ipc import EngineConfig, NodePlace
from armillary.serving.processes.node_messages import (
    Lines,
    NotANode,
    hello,
    line,
    message_of,
    number,
    shown,
    why_refused,
)
from armillary.serving.processes.worker_process import exit_text, frame, spawn

_CONNECT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.2
_HELLO_S = 5.0
_MOST_SAID = 20
"""peers that are no nodes of which the first node says so"""


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

    def __init__(self, config: EngineConfig, ranks: int, say: Say) -> None:
        self._node, self._hello, self._say = config.nodes, hello(config, ranks), say
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._start = 0
        self._refused: set[str] = set()
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
            writer.write(line(message))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = await self._admitted(reader, writer)
        if not rank:
            writer.close()
            return
        if (before := self._writers.get(rank)) is not None:  # its end has not been noticed yet, or there are two of it
            before.write(line({"refused": f"another process has connected as node {rank}"}))
            before.close()
            self.lost = f"node {rank} has started again"
        self._writers[rank] = writer
        self._changed.set()
        why = f"node {rank} has gone away"
        try:
            while data := await reader.readline():
                message = message_of(data)
                if message.get("lost") == self._start:
                    self.lost = f"a rank of node {rank} has ended ({message.get('why')})"
        except (OSError, ValueError, NotANode) as error:  # ValueError: a line that is too long
            why = f"node {rank} has gone away ({error})"
        if self._writers.get(rank) is writer:
            del self._writers[rank]
            self.lost = self.lost or why
        writer.close()

    async def _admitted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """The rank of the node that has connected; 0 where it is none of this engine's, which is told and said."""
        try:
            theirs = message_of(await asyncio.wait_for(reader.readline(), _HELLO_S))
            rank = number(theirs, "node")
        except (OSError, ValueError, NotANode) as error:  # OSError: also a timeout
            host = (writer.get_extra_info("peername") or ("?",))[0]
            self._say_refused(f"{host} connected and is not a node of this engine ({error or 'it sent nothing'})")
            return 0
        refused = why_refused(theirs, self._hello)
        answer = {"refused": refused} if refused else {"welcome": rank, "version": __version__}
        with suppress(OSError):
            writer.write(line(answer))
            await writer.drain()
        if refused:
            self._say_refused(refused)
        return 0 if refused else rank

    def _say_refused(self, text: str) -> None:
        """Once, and of so many peers."""
        if text not in self._refused and len(self._refused) < _MOST_SAID:
            self._refused.add(text)
            self._say(text)


def serve_node(config: EngineConfig, ranks: int, say: Say) -> None:
    """On every other node: its share of `ranks`, whenever the first node starts an engine, until this process ends."""
    node, started = config.nodes, _LocalRanks(config, ranks)
    try:
        while True:
            say(f"node {node.rank} of {node.count}: connecting to {node.host}:{node.port}")
            with _joined(node, hello(config, ranks), say) as connection:
                say(f"node {node.rank} of {node.count}: ranks start when the first node says so")
                try:
                    _obey(connection, started, say)
                    say("the first node has gone away")
                except NotANode as error:
                    say(f"the connection to the first node is given up: {error}")
            time.sleep(_CONNECT_EVERY_S)
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


def _obey(connection: Lines, ranks: _LocalRanks, say: Say) -> None:
    """Until the connection ends, and the ranks with it."""

    def lose(start: int, how: str) -> None:
        ranks.end()
        say(f"a rank has ended ({how}); waiting for the next start")
        connection.sock.sendall(line({"lost": start, "why": how}))

    try:
        while (lines := connection.received(_LOOK_EVERY_S)) is not None:
            for message in map(message_of, lines):
                _check_refused(message)
                if start := number(message, "start"):
                    say("starting ranks")
                    if how := _started(ranks, start, number(message, "port")):
                        lose(start, how)
                else:
                    ranks.end()
            if not lines and ranks.number and (how := ranks.ended()):
                lose(ranks.number, how)
    except OSError:
        pass  # the connection is gone
    finally:
        ranks.end()


def _started(ranks: _LocalRanks, start: int, port: int) -> str:
    """Start ranks; why they could not be, or empty."""
    try:
        ranks.start(start, port)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _joined(node: NodePlace, greeting: dict[str, Any], say: Say) -> Lines:
    """A connection on which the first node has welcomed this one, as soon as it listens; why there is none yet is said
    once. BadInput where it refuses this node."""
    said = ""
    while True:
        try:
            connection = Lines(socket.create_connection((node.host, node.port), timeout=_HELLO_S))
        except OSError as error:
            why = f"not connected yet ({error.strerror or error}); trying again until the first node listens"
        else:
            try:
                _greet(connection, greeting)
                return connection
            except (OSError, NotANode) as error:
                connection.sock.close()
                why = f"{node.host}:{node.port} is not the first node of an engine ({error}); trying again"
            except BaseException:
                connection.sock.close()
                raise
        if why != said:
            say(why)
            said = why
        time.sleep(_CONNECT_EVERY_S)


def _greet(connection: Lines, greeting: dict[str, Any]) -> None:
    """Both say who they are; NotANode where the other end is something else."""
    sock = connection.sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.sendall(line(greeting))
    answer = message_of(connection.first(_HELLO_S))
    _check_refused(answer)
    number(answer, "welcome")
    sock.settimeout(None)


def _check_refused(message: dict[str, Any]) -> None:
    if refused := message.get("refused"):
        raise BadInput(f"the first node refuses this one: {shown(str(refused).encode())}")
