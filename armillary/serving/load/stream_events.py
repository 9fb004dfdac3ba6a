"""What the events of a streamed answer say: a piece of text, an end, the server's count of tokens, an error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass
class Pieces:
    """An answer as it arrives."""

    stamps: list[float] = field(default_factory=list)
    """arrival of every piece that held text"""
    tokens_in: int | None = None
    """by the server's count"""
    tokens_out: int | None = None
    """by the server's count"""
    finished: bool = False
    """an end was said"""
    error: str = ""
    """what the server said went wrong"""

    def add(self, data: bytes, now: float) -> None:
        """One event; `now` is when its bytes came."""
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = f"an event that is not JSON: {data[:80]!r}"
            return
        if not isinstance(event, dict):
            self.error = f"an event that is not an object: {data[:80]!r}"
            return
        if event.get("error"):
            self.error = error_text(event)
        self._count(event.get("usage"))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self.stamps += [now] if _has_text(choice) else []
                self.finished = self.finished or bool(choice.get("finish_reason"))

    def whole(self, data: bytes, now: float) -> None:
        """An answer that was not streamed: all of it came now."""
        self.add(data, now)
        if not self.error:
            self.stamps, self.finished = [now], True

    def _count(self, usage: Any) -> None:
        found = usage if isinstance(usage, dict) else {}
        tokens_in, tokens_out = found.get("prompt_tokens"), found.get("completion_tokens")
        self.tokens_in = tokens_in if isinstance(tokens_in, int) else self.tokens_in
        self.tokens_out = tokens_out if isinstance(tokens_out, int) else self.tokens_out


def _has_text(choice: dict[str, Any]) -> bool:
    """A role alone, or an end alone, is no text."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text")) or any(delta.get(key) for key in _TEXT_KEYS)


def error_text(body: Any) -> str:
    """The sentence in an error of OpenAI's shape, or what there is instead."""
    inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    said = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(said).split())[:200]


class EventStream:
    """Collects bytes and gives the data of every complete event (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, some: bytes) -> list[bytes]:
        """Data of the events that `some` completes."""
        *lines, self._rest = (self._rest + some).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found

    def close(self) -> list[bytes]:
        """Data of a last event whose blank line never came."""
        found = self.feed(b"\n\n") if self._rest or self._data else []
        self._rest = b""
        return found
