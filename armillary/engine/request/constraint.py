"""Structured output: what the output must match, and the interface of a compiled constraint.

The engine asks a constraint for the allowed next tokens and advances it by each sampled token. A library for JSON
schemas, regular expressions and grammars implements it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from armillary.errors import BadInput

StructureKind = Literal["json", "json_schema", "regex", "grammar", "choice"]
KINDS: tuple[StructureKind, ...] = ("json", "json_schema", "regex", "grammar", "choice")


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What the output must match."""

    kind: StructureKind
    """any JSON, JSON of a schema, a regular expression, a grammar, or one of several texts"""
    source: str = ""
    """the schema, expression or grammar; the texts of a choice, one per line"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"no structure '{self.kind}'; use one of {', '.join(KINDS)}")
        if self.kind != "json" and not self.source.strip():
            raise BadInput(f"a structure of kind {self.kind} needs its source; give the schema, expression or grammar")


class Constraint(Protocol):
    """A compiled structure and its state; one per sequence."""

    def allowed(self) -> bytes:
        """Bit v % 8 of byte v // 8 is 1 where token v may come next."""

    def advance(self, token: int) -> bool:
        """Advance by a token; False where it was not allowed."""

    def finished(self) -> bool:
        """Whether the output is complete and nothing may follow."""
