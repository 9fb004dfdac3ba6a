"""Events of a streamed response: text, end, usage, errors."""

import json
from dataclasses import dataclass, field
from typing import Any

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass
class StreamedResponse:
    """A response while it arrives: the times of the chunks with text, and the lengths by the server's count."""

    stamps: list[float] = field(default_factory=list)
    tokens_in: int | None = None
    tokens_out: int | None = None
    finished: bool = False
    error: str = ""

    def add(self, data: bytes, now: float) -> None:
        """Add one event that arrived at `now`."""
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

    def add_complete(self, data: bytes, now: float) -> None:
        """Add a response that was not streamed, which arrived at `now`."""
        self.add(data, now)
        if not self.error:
            self.stamps, self.finished = [now], True

    def _count(self, usage: Any) -> None:
        table = usage if isinstance(usage, dict) else {}
        tokens_in, tokens_out = table.get("prompt_tokens"), table.get("completion_tokens")
        self.tokens_in = tokens_in if isinstance(tokens_in, int) else self.tokens_in
        self.tokens_out = tokens_out if isinstance(tokens_out, int) else self.tokens_out


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice has text, rather than a role or an end only."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text")) or any(delta.get(key) for key in _TEXT_KEYS)


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's form, or the body itself."""
    inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(message).split())[:200]


class EventStream:
    """Parser of server-sent events (WHATWG HTML, section 9.2); aiohttp has none."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """Data of a last event without its blank line."""
        events = self.feed(b"\n\n") if self._rest or self._data else []
        self._rest = b""
        return events
