"""The seam for structured output: what an answer must look like, and what a compiled form of it can tell the engine.

The engine asks a constraint for the tokens that may come next and tells it which one came; a library that knows JSON
schemas, regular expressions and grammars stands behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from armillary.errors import BadInput

Kind = Literal["json", "json_schema", "regex", "grammar", "choice"]
KINDS: tuple[Kind, ...] = ("json", "json_schema", "regex", "grammar", "choice")


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What an answer must match."""

    kind: Kind
    """any JSON, JSON of a schema, a regular expression, a grammar, or one of several texts"""
    source: str = ""
    """the schema, expression or grammar; texts of a choice one a line"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"no structure '{self.kind}'; use one of {', '.join(KINDS)}")
        if self.kind != "json" and not self.source.strip():
            raise BadInput(f"a structure of kind {self.kind} needs its source; give the schema, expression or grammar")


class Constraint(Protocol):
    """A structure while an answer is being made; one for each sequence."""

    def allowed(self) -> bytes:
        """Bit v % 8 of byte v // 8 is 1 where token v may come next."""

    def advance(self, token: int) -> bool:
        """Take the token that came; False where it was not allowed."""

    def finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
