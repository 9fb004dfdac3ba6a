"""A document: one text to train on, or its token ids."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text to learn from."""

    text: str
    """never blank, unless there are ids"""
    origin: str
    """file it came from, with a line or row where the file holds many"""
    ids: tuple[int, ...] = ()
    """token ids in place of a text"""

    @property
    def content(self) -> bytes:
        """What it says, as bytes: equal documents have equal ones."""
        return repr(self.ids).encode() if self.ids else self.text.encode()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that was left out."""

    origin: str
    """which"""
    why: str
    """in a few words"""
