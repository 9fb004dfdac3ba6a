"""How rank 0 tells the other ranks of a step: one TCP connection to each, on one host or between hosts.

Collectives carry tensors between devices; a step comes from the host and is needed on hosts, when nobody is in a
collective. A closed connection means that the other rank has ended, which is noticed at once.
"""

import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.distributed as dist

from armillary.engine.runner.step_bytes import (
    PREFIX,
    RankMessage,
    StepReport,
    decode,
    decode_report,
    encode,
    encode_report,
)
from armillary.errors import ArmillaryError

_TOKEN_BYTES = 16
_CONNECT_S = 300.0
"""time for the other ranks to connect: they may still be loading"""
_BUFFER_BYTES = 1 << 20


class RankGone(ArmillaryError):
    """Another rank has ended."""


class StepSender:
    """On rank 0."""

    def __init__(self, size: int) -> None:
        """Waits for the other ranks to connect."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._sockets: dict[int, socket.socket] = {}
        with socket.create_server((_host(), 0), backlog=size) as server:
            server.settimeout(_CONNECT_S)
            dist.broadcast(torch.tensor([server.getsockname()[1], *token]), src=0)
            while len(self._sockets) < size - 1:
                self._accept(server, token)

    def _accept(self, server: socket.socket, token: bytes) -> None:
        try:
            sock, _ = server.accept()
        except TimeoutError:
            missing = "some ranks" if not self._sockets else f"ranks other than {sorted(self._sockets)}"
            raise RankGone(f"{missing} did not connect within {_CONNECT_S:g} s; see their output") from None
        sock.settimeout(10.0)
        hello = _received(sock, len(token) + 4)
        if hello is None or not secrets.compare_digest(hello[4:], token):
            return sock.close()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[int.from_bytes(hello[:4], "little")] = sock

    def send(self, message: RankMessage, to: Iterable[int] | None = None) -> None:
        """To all other ranks, or to some of them. RankGone where a rank has ended."""
        data = encode(message)
        for rank in self._sockets if to is None else to:
            try:
                self._sockets[rank].sendall(data)
            except OSError as error:
                raise RankGone(f"rank {rank} has ended ({error.strerror}); restart the engine") from None

    def receive_report(self, rank: int) -> StepReport:
        """What the next step gave on a rank that reports. RankGone where it has ended."""
        body = _received_body(self._sockets[rank])
        if body is None:
            raise RankGone(f"rank {rank} has ended; restart the engine")
        return decode_report(*body)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()


class StepReceiver:
    """On the other ranks."""

    def __init__(self, rank: int) -> None:
        given = torch.zeros(1 + _TOKEN_BYTES, dtype=torch.int64)
        dist.broadcast(given, src=0)
        port, *token = given.tolist()
        self._sock = socket.create_connection((_host(), port), timeout=_CONNECT_S)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._sock.sendall(rank.to_bytes(4, "little") + bytes(token))

    def receive(self) -> RankMessage | None:
        """The next message; None where rank 0 has ended without a word."""
        body = _received_body(self._sock)
        return None if body is None else decode(*body)

    def send_report(self, report: StepReport) -> None:
        self._sock.sendall(encode_report(report))

    def shut_down(self) -> None:
        """End the connection under `receive` in another thread, and on rank 0."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _host() -> str:
    """Rank 0's, as launchers name it."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _received_body(sock: socket.socket) -> tuple[memoryview, memoryview] | None:
    """(header, arrays) of a message; None where the connection ended before."""
    prefix = _received(sock, PREFIX.size)
    if prefix is None:
        return None
    header, arrays = PREFIX.unpack(prefix)
    body = _received(sock, header + arrays)
    return None if body is None else (memoryview(body)[:header], memoryview(body)[header:])


def _received(sock: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None where the connection ended before."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = sock.recv_into(view[at:])
        except OSError:
            return None
        if not count:
            return None
        at += count
    return data
