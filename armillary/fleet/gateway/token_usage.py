"""Token counts in a response as it passes through: complete JSON, or the last events of a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_LAST, _LAST_EVENTS = 65_536, 4096
"""bytes at the end of a complete response, and of a stream, that are looked at for the counts"""
_MARKS = (b'"usage":{', b'"usage": {')
_DATA = b"data:"
_BOUNDARY = re.compile(rb"(\r\n\r\n|\n\n)")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request."""

    prompt: int
    completion: int


class UsageReader:
    """Looks at a response's bytes without delaying them; `hidden`: the event with the counts was not asked for by the
    client, so it is taken out, for which a stream is passed on event by event."""

    def __init__(self, *, stream: bool, hidden: bool) -> None:
        self._stream, self._hidden = stream, hidden
        self._head = b""  # of a stream: Anthropic's counts the prompt in its first event
        self._tail = b""  # of a complete response, or of an event whose end has not arrived
        self._usage: TokenUsage | None = None

    def feed(self, data: bytes) -> bytes:
        """What to send to the client now."""
        if not self._stream:
            self._tail = (self._tail + data)[-_LAST:]
            return data
        if not self._hidden:
            if len(self._head) < _LAST_EVENTS:
                self._head += data[:_LAST_EVENTS]
            self._tail = (self._tail + data)[-_LAST_EVENTS:]
            return data
        return self._without_usage(data)

    def _without_usage(self, data: bytes) -> bytes:
        data = self._tail + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4 and len(data) < _LAST:  # no complete event yet
            self._tail = data
            return b""
        end = end if end >= 4 else len(data)
        data, self._tail = data[:end], data[end:]
        if not any(mark in data for mark in _MARKS):
            return data
        pieces = _BOUNDARY.split(data)  # event, boundary, event, boundary, …
        return b"".join(event + boundary for event, boundary in _paired(pieces) if self._is_shown(event))

    def _is_shown(self, event: bytes) -> bool:
        """Whether an event is more than the counts, which are noted."""
        table = _json(event)
        usage = _usage_of(table)
        if usage is not None:
            self._usage = usage
        return usage is None or bool(table.get("choices"))

    def rest(self) -> bytes:
        """Bytes after the last complete event, at the end of a stream."""
        rest, self._tail = (self._tail, b"") if self._stream and self._hidden else (b"", self._tail)
        return rest

    def usage(self) -> TokenUsage | None:
        """The counts, once the response has ended; None where it has none."""
        if self._usage is not None or (self._stream and self._hidden):
            return self._usage
        if self._stream:
            first, last = _stream_counts(self._head), _stream_counts(self._tail)
            return _complete(last[0] if last[0] is not None else first[0], last[1])
        at = max(self._tail.rfind(mark) for mark in _MARKS)
        if at < 0:
            return None
        try:
            return _usage_of(msgspec.json.decode(self._tail))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _usage_of({"usage": _object_at(self._tail, self._tail.index(b"{", at))})


def _paired(pieces: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Events with the boundary after each; the last may have none."""
    for index in range(0, len(pieces), 2):
        yield pieces[index], pieces[index + 1] if index + 1 < len(pieces) else b""


def _object_at(data: bytes, start: int) -> Any:
    """The innermost JSON object that begins at `start`, of a response whose beginning was not kept."""
    depth = 0
    for position in range(start, len(data)):
        depth += {123: 1, 125: -1}.get(data[position], 0)
        if not depth:
            try:
                return msgspec.json.decode(data[start : position + 1])
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
    return None


def _json(event: bytes) -> dict[str, Any]:
    lines = [line[len(_DATA) :].strip() for line in event.split(b"\n") if line.startswith(_DATA)]
    try:
        table = msgspec.json.decode(b"".join(lines))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _stream_counts(data: bytes) -> tuple[int | None, int | None]:
    """Prompt and completion tokens in the last event that has counts."""
    at = max(data.rfind(mark) for mark in _MARKS)
    return _counts(_object_at(data, data.index(b"{", at))) if at >= 0 else (None, None)


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """Of a usage object in the words of OpenAI or Anthropic, whose prompt tokens leave out those of its cache."""
    if not isinstance(usage, dict):
        return None, None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    cached = [usage.get(f"cache_{kind}_input_tokens") for kind in ("creation", "read")]
    if isinstance(prompt, int):
        prompt += sum(count for count in cached if isinstance(count, int))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    return prompt if isinstance(prompt, int) else None, completion if isinstance(completion, int) else None


def _complete(prompt: int | None, completion: int | None) -> TokenUsage | None:
    return TokenUsage(prompt, completion or 0) if prompt is not None else None


def _usage_of(table: Any) -> TokenUsage | None:
    return _complete(*_counts(table.get("usage"))) if isinstance(table, dict) else None
