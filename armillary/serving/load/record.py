"""Requests of a load test and their results; all times are seconds since the start of the test."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """One request without its text."""

    at_s: float | None
    """send time; none: when a client is free"""
    tokens_in: int
    tokens_out: int
    blocks: tuple[int, ...] = ()
    """Mooncake: ids of the prompt's blocks of 512 tokens; equal ids are equal text"""
    is_long: bool = False
    """of the traffic's second stream"""


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """One request, ready to send: its position in the test, its send time as planned, and its JSON."""

    index: int
    at_s: float | None
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestResult:
    """The result of one request; `due_s` is its scheduled and `sent_s` its actual send time."""

    index: int
    due_s: float
    sent_s: float
    end_s: float
    stamps_s: tuple[float, ...] = ()
    """arrival times of the streamed chunks with text"""
    tokens_in: int | None = None
    """prompt length by the server's count; none: it did not report it"""
    tokens_out: int = 0
    counted_by: Literal["usage", "chunks"] = "chunks"
    """source of tokens_out: the server's usage, or the number of chunks"""
    error: str = ""
    """why the request failed; empty: it succeeded"""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        """Send time to first chunk of text."""
        return self.stamps_s[0] - self.sent_s if self.stamps_s else None

    @property
    def due_ttft_s(self) -> float | None:
        """TTFT from the scheduled send time, as a user would have waited."""
        return self.stamps_s[0] - self.due_s if self.stamps_s else None

    @property
    def e2e_s(self) -> float:
        """Send time to last chunk of text; without text, to the end of the response."""
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
        """Gaps between consecutive chunks."""
        return [after - before for before, after in zip(self.stamps_s, self.stamps_s[1:], strict=False)]
