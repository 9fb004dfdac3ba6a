"""What a check of a text says: spans to mask or a reason to block. A check is a plain function.

SpanCheck:   text -> spans that match, for masks and deny lists; works on any part of a text
TextCheck:   text -> reason to block it, or None; asks another server
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A part of a text that a check matched."""

    start: int
    end: int
    kind: str  # what it is, as email, or which rule matched


SpanCheck = Callable[[str], list[Span]]
TextCheck = Callable[[str], Awaitable[str | None]]


class Blocked(Exception):
    """A text that must not pass."""

    def __init__(self, guard: str, reason: str) -> None:
        super().__init__(reason)
        self.guard, self.reason = guard, reason


def masked(text: str, spans: Iterable[Span]) -> str:
    """The text with [KIND] in place of every span; of spans that overlap, the first."""
    parts, at = [], 0
    for span in sorted(spans):
        if span.start >= at:
            parts += [text[at : span.start], f"[{span.kind.upper()}]"]
            at = span.end
    return "".join([*parts, text[at:]])
