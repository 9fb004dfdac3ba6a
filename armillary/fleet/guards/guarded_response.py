"""Guards on a response of /v1/chat/completions or /v1/completions, complete or as a stream.

A stream passes event by event; the text of each choice runs through a `TextStream`, which holds back at most a window.
Where a check blocks, the choices end with the finish_reason content_filter, as OpenAI's do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from armillary.fleet.guards.guard_verdict import Blocked
from armillary.fleet.guards.text_stream import NamedCheck, TextStream, checked
from armillary.serving.http.problem import Problem

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n")
_MOST_EVENT = 1_000_000
_TEXTS = ("content", "reasoning_content", "reasoning", "text")
_DONE = b"data: [DONE]\n\n"


class GuardedStream:
    """One stream; `blocked` is set where a check has ended it."""

    def __init__(self, checks: Sequence[NamedCheck]) -> None:
        self._checks = checks
        self._texts: dict[tuple[int, str], TextStream] = {}
        self._pending = b""
        self._last: dict[str, Any] = {}
        self.blocked: Blocked | None = None

    @property
    def masks(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for text in self._texts.values():
            for name, count in text.masks.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    async def feed(self, data: bytes) -> bytes:
        """Events that may pass now."""
        self._pending += data
        *events, self._pending = _BOUNDARY.split(self._pending)
        if len(self._pending) > _MOST_EVENT:
            raise Problem(502, "the replica sent an event that is too large to check; send the request again")
        shown = b""
        for event in events:
            shown += await self._event(event)
            if self.blocked is not None:
                break
        return shown

    async def _event(self, event: bytes) -> bytes:
        data = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return event + b"\n\n" if event.strip() else b""  # a comment
        if data == b"[DONE]":
            rest = await self._rest()
            return rest if self.blocked is not None else rest + _DONE
        try:
            table = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Problem(502, "the replica sent an event that cannot be checked; send the request again") from None
        choices = table.get("choices") if isinstance(table, dict) else None
        if not choices:
            return event + b"\n\n"
        self._last = table
        try:
            shown = [choice for choice in choices if await self._choice(choice)]
        except Blocked as blocked:
            self.blocked = blocked
            return self._end(choices)
        return _event({**table, "choices": shown}) if shown else b""

    async def finish(self) -> bytes:
        """The last events, once the replica's stream has ended: also of one that ends without a blank line, or without
        a finish_reason."""
        if self.blocked is not None:
            return b""
        event, self._pending = self._pending, b""
        shown = await self._event(event) if event.strip() else b""
        return shown + (await self._rest() if self.blocked is None else b"")

    async def _rest(self) -> bytes:
        """What is still held back, as an event of its own."""
        is_chat = any("delta" in choice for choice in self._last.get("choices") or ())
        choices: list[dict[str, Any]] = []
        try:
            for index in sorted({index for index, _ in self._texts}):
                delta: dict[str, Any] = {}
                await self._flush(index, delta)
                if delta:
                    part = {"delta": delta} if is_chat else delta
                    choices.append({"index": index, **part, "logprobs": None, "finish_reason": None})
        except Blocked as blocked:
            self.blocked = blocked
            return self._end(self._last.get("choices") or [])
        return _event({**self._last, "choices": choices}) if choices else b""

    async def _choice(self, choice: dict[str, Any]) -> bool:
        """Replace the texts of a choice by what may pass; whether anything is left to send."""
        index, is_last = choice.get("index", 0), choice.get("finish_reason") is not None
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
        assert isinstance(delta, dict)
        choice["logprobs"] = None  # they would have the text, too
        had = False
        for name in _TEXTS:
            if isinstance(delta.get(name), str) and delta[name]:
                had = True
                delta[name] = await self._text(index, name).push(delta[name])
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("arguments"):
                had = True
                name = f"call {call.get('index', 0)}"
                function["arguments"] = await self._text(index, name).push(function["arguments"])
        if is_last:
            await self._flush(index, delta)
        has_text = [name for name in _TEXTS if delta.get(name)] or delta.get("tool_calls") or delta.get("role")
        return bool(is_last or has_text or not had)

    def _text(self, index: int, name: str) -> TextStream:
        return self._texts.setdefault((index, name), TextStream(self._checks))

    async def _flush(self, index: int, delta: dict[str, Any]) -> None:
        """Add what was held back to the last event of a choice."""
        for (number, name), text in self._texts.items():
            if number != index or not (rest := await text.finish()):
                continue
            if not name.startswith("call "):
                delta[name] = (delta.get(name) or "") + rest
                continue
            call = {"index": int(name[5:]), "function": {"arguments": rest}}
            delta["tool_calls"] = [*(delta.get("tool_calls") or ()), call]

    def _end(self, choices: list[dict[str, Any]]) -> bytes:
        """The last events of a stream that is blocked."""
        key = "delta" if "delta" in choices[0] else "text"
        indices = sorted({index for index, _ in self._texts} | {choice.get("index", 0) for choice in choices})
        ended = [
            {"index": index, key: {} if key == "delta" else "", "logprobs": None, "finish_reason": "content_filter"}
            for index in indices
        ]
        return _event({**self._last, "choices": ended}) + _DONE


async def guarded_response(data: bytes, checks: Sequence[NamedCheck]) -> tuple[bytes, dict[str, int], Blocked | None]:
    """A complete response as it may pass, how often each check masked, and why it was blocked."""
    try:
        table = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Problem(502, "the replica's answer is not JSON, so it cannot be checked; send it again") from None
    masks: dict[str, int] = {}
    choices = table.get("choices") if isinstance(table, dict) else None
    try:
        for choice in choices or ():
            await _guard_choice(choice, checks, masks)
    except Blocked as blocked:
        for choice in choices or ():
            _empty(choice)
        return msgspec.json.encode(table), masks, blocked
    return msgspec.json.encode(table), masks, None


async def _guard_choice(choice: dict[str, Any], checks: Sequence[NamedCheck], masks: dict[str, int]) -> None:
    choice["logprobs"] = None
    places = [(part, name) for part in _parts(choice) for name in _TEXTS if isinstance(part.get(name), str)]
    places += [
        (call["function"], "arguments")
        for part in _parts(choice)
        for call in part.get("tool_calls") or ()
        if isinstance(call.get("function"), dict) and isinstance(call["function"].get("arguments"), str)
    ]
    for place, name in places:
        place[name], counts = await checked(place[name], checks)
        for guard, count in counts.items():
            masks[guard] = masks.get(guard, 0) + count


def _empty(choice: dict[str, Any]) -> None:
    choice["finish_reason"], choice["logprobs"] = "content_filter", None
    for part in _parts(choice):
        part.pop("tool_calls", None)
        part.update({name: "" for name in _TEXTS if name in part})


def _parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A choice and its message or delta, each of which may have text."""
    inner = [choice.get(name) for name in ("message", "delta")]
    return [choice, *(part for part in inner if isinstance(part, dict))]


def _event(table: dict[str, Any]) -> bytes:
    return b"data: " + bytes(msgspec.json.encode(table)) + b"\n\n"
