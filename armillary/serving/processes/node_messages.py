"""Messages between the nodes of one engine: lines of JSON over TCP, the first of each side with its version.

    a node         {"node": 1, "of": 2, "version": "0.2.0"}   and later {"lost": 3, "why": "…"}
    the first      {"welcome": 1, "version": "0.2.0"}         and later {"start": 3, "port": 41234}, {"start": 0}
                   {"refused": "…"}                           instead of a welcome; the node ends with that text

Anything else may be at the other end of a port: what it sends is shortened and shown, never trusted.
"""

from __future__ import annotations

import json
from typing import Any

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
