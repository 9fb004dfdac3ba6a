"""A growing text with checks: what is certain passes, and no more than a window is held back.

Masks and deny lists see the held text together with some that has passed, so that a match that arrives in pieces is
found; a match that may still grow is held. Checks of another server see the text every `batch` characters, before it
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.fleet.guards.guard_verdict import Blocked, Span, SpanCheck, TextCheck, masked

_BEFORE = 64
"""characters that have passed and are looked at again, for word boundaries"""
_MOST_CONTEXT = 8000
"""characters that a check of another server sees, the last of them"""


@dataclass(frozen=True, slots=True)
class NamedCheck:
    """A check with its name and what a match leads to."""

    name: str
    blocks: bool  # else it masks
    spans: SpanCheck | None = None
    text: TextCheck | None = None


class TextStream:
    """One text on its way."""

    def __init__(self, checks: Sequence[NamedCheck], *, window: int = 256, batch: int = 400) -> None:
        self._spans = [check for check in checks if check.spans is not None]
        self._texts = [check for check in checks if check.text is not None]
        self._window = window if self._spans else 0
        self._batch = batch if self._texts else 0
        self._before = self._held = ""  # passed already, and not yet
        self._unchecked = self._checked = (
            ""  # after masking: waits for the checks of other servers, and has passed them
        )
        self.masks: dict[str, int] = {}  # by the name of the check

    async def push(self, text: str) -> str:
        """What may pass now; Blocked where a check says so."""
        self._held += text
        return await self._checked_text(self._release(self._window), last=False)

    async def finish(self) -> str:
        """The rest, once the text is complete."""
        return await self._checked_text(self._release(0), last=True)

    def _release(self, window: int) -> str:
        """Masked text up to the window, or up to a match that reaches into it."""
        text, offset = self._before + self._held, len(self._before)
        matches = self._matches(text, offset)
        end = max(offset, len(text) - window)
        for _, span in sorted(matches, key=lambda match: match[1], reverse=True):
            if span.start < end < span.end:
                end = max(offset, span.start)
        complete = [(name, span) for name, span in matches if span.end <= end]
        for name, _ in complete:
            self.masks[name] = self.masks.get(name, 0) + 1
        shown = masked(text[offset:end], [_moved(span, offset) for _, span in complete])
        self._before, self._held = text[max(0, end - _BEFORE) : end], text[end:]
        return shown

    def _matches(self, text: str, offset: int) -> list[tuple[str, Span]]:
        """Spans to mask that are not in what has passed, with their checks; Blocked at a match of one that blocks."""
        matches: list[tuple[str, Span]] = []
        for check in self._spans:
            assert check.spans is not None
            spans = [span for span in check.spans(text) if span.end > offset]
            if spans and check.blocks:
                raise Blocked(check.name, spans[0].kind)
            matches += [(check.name, Span(max(span.start, offset), span.end, span.kind)) for span in spans]
        return matches

    async def _checked_text(self, text: str, *, last: bool) -> str:
        if not self._texts:
            return text
        self._unchecked += text
        if not self._unchecked or (len(self._unchecked) < self._batch and not last):
            return ""
        self._checked = (self._checked + self._unchecked)[-_MOST_CONTEXT:]
        for check in self._texts:
            assert check.text is not None
            reason = await check.text(self._checked)
            if reason is not None:
                raise Blocked(check.name, reason)
        passed, self._unchecked = self._unchecked, ""
        return passed


def _moved(span: Span, offset: int) -> Span:
    return Span(span.start - offset, span.end - offset, span.kind)


async def checked(text: str, checks: Sequence[NamedCheck]) -> tuple[str, dict[str, int]]:
    """A complete text as it may pass, and how often each check masked; Blocked where one says so."""
    stream = TextStream(checks, window=0)
    passed = await stream.push(text) + await stream.finish()
    return passed, stream.masks
