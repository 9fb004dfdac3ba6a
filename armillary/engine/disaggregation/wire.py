"""Frames between a prefill and a decode server, over TCP: a fixed header, then raw bytes.

    decode  → prefill   HELLO, then REQUEST and CANCEL; SHARE and FREE where both are on one host
    prefill → decode    HELLO or REFUSAL, then BLOCKS, SHARED_BLOCKS and DONE; ALIVE when there was nothing to send for
                        a second

That is between their first ranks. Other ranks that exchange heads have a connection for their blocks alone, which a
decode rank opens with JOIN. The same blocks travel in frames of the same number, in the same order, on all of them.

Nothing that arrives is executed or unpickled, and lengths are checked before memory is taken.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from armillary.errors import ArmillaryError, BadRecipe

VERSION = 4
HEADER = struct.Struct("<BxxxIQQQ")  # kind, entries, number of the request, bytes of the head, bytes of the payload
ENTRY = struct.Struct("<HxxI")  # group, index: one block
SLOT = struct.Struct("<QQ")  # number, bytes: of a slot of shared memory
_RANKS = struct.Struct("<H")  # of the decode server, in its HELLO after the fingerprint
_WELCOME = struct.Struct("<16sHH")  # key of the connection, ranks and stages of the prefill server; shared memory
_JOIN = struct.Struct("<16sH")  # key, rank of the decode server
SILENCE_S = 10.0
"""time without a frame after which the other side counts as gone"""
SEND_S = 60.0
"""time that the other side may leave a frame unread"""
_MOST_HEAD = 1 << 26
_MOST_PAYLOAD = 1 << 30


class FrameType(IntEnum):
    HELLO = 1
    REFUSAL = 2
    REQUEST = 3
    CANCEL = 4
    BLOCKS = 5
    DONE = 6
    ALIVE = 7
    SHARE = 8  # the decode side sees the prefill side's shared memory
    SHARED_BLOCKS = 9  # blocks lie in a slot of it
    FREE = 10  # the decode side has read a slot
    JOIN = 11  # another rank of a decode server takes its heads


class Frame(NamedTuple):
    """`head` is small; `payload` holds blocks."""

    kind: FrameType
    number: int = 0
    entries: int = 0
    head: bytes | memoryview = b""
    payload: memoryview = memoryview(b"")


class PeerGone(ArmillaryError):
    """The other side closed the connection, fell silent, or sent something that is not a frame."""


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, also [IPv6]:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise BadRecipe(f"serve.prefill={text!r} is no address; give HOST:PORT, like 10.0.0.5:9100")
    return host.removeprefix("[").removesuffix("]"), int(port)


def prepare(sock: socket.socket) -> None:
    """Send at once, and give up on a peer that acknowledges or reads nothing for `SEND_S`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_S))


def send(sock: socket.socket, frame: Frame) -> None:
    """PeerGone where the connection has ended or nobody reads."""
    payload = frame.payload
    header = HEADER.pack(frame.kind, frame.entries, frame.number, len(frame.head), payload.nbytes)
    try:
        sock.sendall(header + bytes(frame.head))
        if payload.nbytes:
            sock.sendall(payload)
    except OSError as error:
        raise PeerGone(f"the connection ended ({error.strerror or error})") from None


def receive(sock: socket.socket, buffer: Callable[[int], memoryview] | None = None) -> Frame:
    """The next frame; PeerGone where none comes within the socket's timeout. Its payload is read into what `buffer`
    gives for its size; without one, none may come."""
    kind, entries, number, head_bytes, payload_bytes = HEADER.unpack(
        _received(sock, memoryview(bytearray(HEADER.size)))
    )
    most = 0 if buffer is None or kind != FrameType.BLOCKS else _MOST_PAYLOAD
    if kind not in FrameType._value2member_map_ or head_bytes > _MOST_HEAD or payload_bytes > most:
        raise PeerGone("it sent something that is not a frame; is it a prefill or decode server of this version?")
    head = _received(sock, memoryview(bytearray(head_bytes)))
    if buffer is None or kind != FrameType.BLOCKS:
        return Frame(FrameType(kind), number, entries, head)
    return Frame(FrameType(kind), number, entries, head, _received(sock, buffer(payload_bytes)))


def _received(sock: socket.socket, view: memoryview) -> memoryview:
    """Fill `view`."""
    at = 0
    while at < view.nbytes:
        try:
            count = sock.recv_into(view[at:])
        except TimeoutError:
            raise PeerGone("it has been silent for too long") from None
        except OSError as error:
            raise PeerGone(f"the connection ended ({error.strerror or error})") from None
        if not count:
            raise PeerGone("it closed the connection")
        at += count
    return view


def close(sock: socket.socket) -> None:
    """Close a socket that another thread may be reading."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def hello(fingerprint: bytes, ranks: int = 1) -> Frame:
    """Of a decode server with so many ranks."""
    return Frame(FrameType.HELLO, VERSION, head=fingerprint + _RANKS.pack(ranks))


def read_hello(frame: Frame) -> tuple[bytes, int]:
    """(fingerprint, ranks)"""
    at = max(0, len(frame.head) - _RANKS.size)
    return bytes(frame.head[:at]), _read(_RANKS, frame.head[at:])[0]


class Welcome(NamedTuple):
    """A prefill server's answer to a HELLO."""

    key: bytes
    """by which the decode server's other ranks join"""
    ranks: int
    stages: int
    """of layers, each on as many of the ranks"""
    offer: bytes
    """of shared memory"""

    def frame(self) -> Frame:
        return Frame(FrameType.HELLO, VERSION, head=_WELCOME.pack(self.key, self.ranks, self.stages) + self.offer)

    @staticmethod
    def read(frame: Frame) -> Welcome:
        key, ranks, stages = _read(_WELCOME, frame.head)
        return Welcome(key, ranks, stages, bytes(frame.head[_WELCOME.size :]))


def join(key: bytes, rank: int) -> Frame:
    return Frame(FrameType.JOIN, VERSION, head=_JOIN.pack(key, rank))


def read_join(frame: Frame) -> tuple[bytes, int]:
    """(key, rank)"""
    key, rank = _read(_JOIN, frame.head)
    return key, rank


def _read(form: struct.Struct, head: bytes | memoryview) -> tuple[Any, ...]:
    if len(head) < form.size:
        raise PeerGone("its greeting is too short")
    return form.unpack_from(head)


class Prompt(NamedTuple):
    """A prompt whose blocks are wanted: those of full attention from block `first` on."""

    first: int
    salt: str
    tokens: list[int]

    def frame(self, number: int) -> Frame:
        salt = self.salt.encode()
        head = struct.pack("<II", self.first, len(salt)) + salt + array("i", self.tokens).tobytes()
        return Frame(FrameType.REQUEST, number, head=head)

    @staticmethod
    def read(frame: Frame) -> Prompt:
        head = bytes(frame.head)
        try:
            first, size = struct.unpack_from("<II", head)
            tokens = array("i", head[8 + size :]).tolist()
            return Prompt(first, head[8 : 8 + size].decode(), tokens)
        except (struct.error, ValueError):
            raise PeerGone("it sent a prompt that cannot be read") from None


def entries_head(entries: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(ENTRY.pack(group, index) for group, index in entries)


def read_slot(frame: Frame) -> tuple[tuple[int, int], Frame]:
    """((number, bytes) of the slot in which blocks lie, the frame as if they had come in it)"""
    if len(frame.head) < SLOT.size:
        raise PeerGone("it sent blocks without saying where")
    number, size = SLOT.unpack_from(frame.head)
    return (number, size), frame._replace(head=frame.head[SLOT.size :])


def read_entries(num_entries: int, head: bytes | memoryview) -> list[tuple[int, int]]:
    """(group, index) of each block in the payload."""
    if len(head) != num_entries * ENTRY.size:
        raise PeerGone("it sent blocks without saying which")
    return list(ENTRY.iter_unpack(head))
