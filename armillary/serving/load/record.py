"""What a load test sends and what it notes of every answer; all times are seconds after the test began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One request before it has words."""

    at_s: float | None
    """when it is to be sent; none: when a client is free"""
    tokens_in: int
    """prompt length asked for"""
    tokens_out: int
    """answer length asked for"""
    blocks: tuple[int, ...] = ()
    """Mooncake: names of the prompt's blocks of 512 tokens; equal names are equal text"""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One request, ready to be sent."""

    index: int
    """its place in the test"""
    at_s: float | None
    """when it is to be sent; none: when a client is free"""
    body: bytes
    """its JSON"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of one request."""

    index: int
    """its place in the test"""
    due_s: float
    """when it was to be sent"""
    sent_s: float
    """when it was"""
    end_s: float
    """when the answer was complete, or had failed"""
    stamps_s: tuple[float, ...] = ()
    """arrival of every streamed piece that held text"""
    tokens_in: int | None = None
    """prompt length by the server's count; none: it did not say"""
    tokens_out: int = 0
    """answer length"""
    counted_by: Literal["usage", "chunks"] = "chunks"
    """who counted tokens_out: the server, or we, a piece being a token"""
    error: str = ""
    """why it failed; empty: it did not"""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        """Sent to first piece of text."""
        return self.stamps_s[0] - self.sent_s if self.stamps_s else None

    @property
    def due_ttft_s(self) -> float | None:
        """The same from when it was to be sent: what a person who clicked then has waited."""
        return self.stamps_s[0] - self.due_s if self.stamps_s else None

    @property
    def e2e_s(self) -> float:
        """Sent to last piece of text; of an answer without text, to its end."""
        return (self.stamps_s[-1] if self.stamps_s else self.end_s) - self.sent_s

    @property
    def due_e2e_s(self) -> float:
        return self.e2e_s + self.sent_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end − TTFT) / (tokens − 1); none for a single token."""
        if self.ttft_s is None or self.tokens_out < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.tokens_out - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive pieces."""
        return [after - before for before, after in zip(self.stamps_s, self.stamps_s[1:], strict=False)]
