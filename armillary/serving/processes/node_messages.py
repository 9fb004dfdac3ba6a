"""Messages between the nodes of one engine: lines of JSON over TCP, the first of each side with its version.

    a node         {"node": 1, "of": 2, "version": "0.2.0", "settings": {"ranks": 4, "serve.dtype": "bf16", …}}
                   and later {"lost": 3, "why": "…"}
    the first      {"welcome": 1, "version": "0.2.0"}         and later {"start": 3, "port": 41234}, {"start": 0}
                   {"refused": "…"}                           instead or later; the node ends with that text

Anything else may be at the other end of a port: what it sends is shortened and shown, never trusted.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

from armillary import __version__
from armillary.serving.processes.engine_ipc import EngineConfig

_SHARED = (
    "dtype",
    "weights",
    "kv_dtype",
    "pp",
    "ep",
    "dp_attention",
    "block_tokens",
    "max_model_len",
    "max_running",
    "max_tokens_per_step",
)
"""keys of [serve] that ranks must agree on: else they would wait for each other's sums, or add up different things"""
MOST_LINE = 1 << 16
"""bytes"""
_SHOWN = 120


class NotANode(Exception):
    """What came is no message of a node."""


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def message_of(data: bytes) -> dict[str, Any]:
    """NotANode where the line is not one object of JSON."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise NotANode(f"it sent {shown(data)}") from None
    if not isinstance(message, dict):
        raise NotANode(f"it sent {shown(data)}")
    return message


def number(message: dict[str, Any], name: str) -> int:
    """A whole number of a message; NotANode where there is none."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise NotANode(f"its message has no {name}")
    return value


def shown(data: bytes) -> str:
    """The beginning of what came, without what a terminal would act on."""
    text = data.decode("utf-8", "replace").strip()
    text = "".join(char if char.isprintable() else "?" for char in text[: _SHOWN + 1])
    return repr(text[:_SHOWN] + "…" if len(text) > _SHOWN else text)


# --- greeting


def hello(config: EngineConfig, ranks: int) -> dict[str, Any]:
    """What a node says of itself."""
    settings = {"ranks": ranks} | {f"serve.{key}": getattr(config.serve, key) for key in _SHARED}
    node = config.nodes
    return {"node": node.rank, "of": node.count, "version": __version__, "settings": settings}


def why_refused(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Why a node that says this is none of the engine whose first node says `ours`; empty where it is one."""
    rank, count = theirs["node"], ours["of"]
    if theirs.get("version") != ours["version"]:
        version = shown(str(theirs.get("version")).encode())
        return f"node {rank} has armillary {version}, the first node '{ours['version']}'; install the same on both"
    if theirs.get("of") != count or not 0 < rank < count:
        return f"node {rank} has another serve.nodes or serve.node_rank than one of 1 to {count - 1} of {count}"
    settings = theirs.get("settings")
    for name, value in ours["settings"].items():
        given = settings.get(name) if isinstance(settings, dict) else None
        if given != value:
            advice = "start the same command on both" if name == "ranks" else f"add --set {name}={value} on both"
            return f"node {rank} has {name} {shown(str(given).encode())}, the first node '{value}'; {advice}"
    return ""


class Lines:
    """A connection to the first node, and the lines that came."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._pending = sock, b""
        self._next: list[bytes] = []  # that came with the first line

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def received(self, timeout_s: float) -> list[bytes] | None:
        """Complete lines, after at most so long; None at the end of the connection, NotANode for a line too long."""
        if self._next:
            lines, self._next = self._next, []
            return lines
        if not select.select([self.sock], [], [], timeout_s)[0]:
            return []
        data = self.sock.recv(4096)
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MOST_LINE:
            raise NotANode(f"it sent a line of more than {MOST_LINE:,} bytes")
        return lines

    def first(self, timeout_s: float) -> bytes:
        """One line; NotANode where none comes in that time."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            lines = self.received(left)
            if lines is None:
                break
            if lines:
                self._next = lines[1:]
                return lines[0]
        raise NotANode(f"it sent {shown(self._pending)}" if self._pending else "it sent nothing")
