"""Reasoning in a model's output, split from its answer while it grows.

| format | reasoning | answer |
|---|---|---|
| think | between `<think>` and `</think>`; the chat template may have opened it | the rest |
| harmony | messages of the channel analysis | messages of the channel final, and calls of functions (gpt-oss) |
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from armillary.serving.openai.tool_calls import ToolCallText, call_of, parse_json, split_overlap

_OPEN, _CLOSE = "<think>", "</think>"
_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
REASONING_TOKENS = {
    "harmony": frozenset({_CHANNEL, _MESSAGE, _START, "<|constrain|>", *_ENDS}),
    "think": frozenset({_OPEN, _CLOSE}),
}
"""special tokens that the parser of a format needs in the text"""
_TO = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.\-]+)")


@dataclass(slots=True)
class OutputParts:
    """What is certain after some more output."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCallText, ...] = ()


class ReasoningStream(Protocol):
    """Splits a growing output."""

    def push(self, text: str) -> OutputParts: ...

    def finish(self) -> OutputParts: ...


def reasoning_format_of(templates: Collection[str]) -> str | None:
    """The format of a model, from its chat templates; none: it has no known one."""
    text = "\n".join(templates)
    if _CHANNEL in text and _MESSAGE in text:
        return "harmony"
    return "think" if _CLOSE in text else None


def reasoning_stream(kind: str, prompt_end: str, names: Collection[str]) -> ReasoningStream:
    """The parser of one output; `prompt_end` is the end of the prompt's text, `names` are those of functions."""
    return HarmonyMessages(names) if kind == "harmony" else ThinkTags(is_open=prompt_end.rstrip().endswith(_OPEN))


class ThinkTags:
    """Reasoning between tags."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open, self._pending, self._has_text = is_open, "", False

    def push(self, text: str) -> OutputParts:
        self._pending += text
        parts = OutputParts()
        while True:
            mark = _CLOSE if self._is_open else _OPEN
            place = self._pending.find(mark)
            if place < 0:
                break
            before, self._pending = self._pending[:place], self._pending[place + len(mark) :]
            self._add(parts, before)
            self._is_open = not self._is_open
        certain, self._pending = split_overlap(self._pending, mark)
        self._add(parts, certain)
        return parts

    def finish(self) -> OutputParts:
        parts, pending = OutputParts(), self._pending
        self._pending = ""
        self._add(parts, pending)
        return parts

    def _add(self, parts: OutputParts, text: str) -> None:
        if self._is_open:
            parts.reasoning += text
            return
        if not self._has_text:
            text = text.lstrip("\n")  # line ends after the reasoning
        self._has_text = self._has_text or bool(text)
        parts.text += text


class HarmonyMessages:
    """Messages of channels, as gpt-oss writes them."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._pending = names, ""
        self._header: str | None = ""  # of the message so far; None while in its content
        self._channel, self._function, self._content = "final", "", ""

    def push(self, text: str) -> OutputParts:
        self._pending += text
        parts = OutputParts()
        while self._step(parts):
            pass
        if self._header is None:
            certain = self._pending
            for mark in _ENDS:
                shorter, _ = split_overlap(self._pending, mark)
                certain = min(certain, shorter, key=len)
            self._pending = self._pending[len(certain) :]
            self._add(parts, certain)
        return parts

    def _step(self, parts: OutputParts) -> bool:
        """Take one mark from the pending text; False where none is complete."""
        if self._header is not None:
            before, mark, after = self._pending.partition(_MESSAGE)
            if not mark:
                return False
            self._begin(before)
            self._pending = after
            return True
        places = [(place, mark) for mark in _ENDS if (place := self._pending.find(mark)) >= 0]
        if not places:
            return False
        place, mark = min(places)
        self._add(parts, self._pending[:place])
        self._end(parts)
        self._pending = self._pending[place + len(mark) :]
        return True

    def _begin(self, header: str) -> None:
        channel = header.rpartition(_CHANNEL)[2]
        self._channel = channel.split()[0] if channel.split() else "final"
        to = _TO.search(header)
        self._function, self._content, self._header = to.group(1) if to else "", "", None

    def _add(self, parts: OutputParts, text: str) -> None:
        if self._function:
            self._content += text
        elif self._channel == "analysis":
            parts.reasoning += text
        else:
            parts.text += text

    def _end(self, parts: OutputParts) -> None:
        if self._function:
            call = call_of({"name": self._function, "arguments": parse_json(self._content)}, self._names)
            if call is not None:
                parts.calls = (*parts.calls, call)
            else:
                parts.text += self._content
        self._header, self._function, self._content = "", "", ""

    def finish(self) -> OutputParts:
        """The last message ends with the output: its mark is an end token, which is not part of the text."""
        parts = OutputParts()
        if self._header is None:
            self._add(parts, self._pending)
            self._end(parts)
        elif not any(mark in self._pending for mark in (_CHANNEL, _START)):
            parts.text += self._pending  # no message at all
        self._pending = ""
        return parts
