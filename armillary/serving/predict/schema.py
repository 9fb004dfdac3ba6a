"""Inputs and outputs of a model: names, dtypes and shapes, as far as its file states them."""

from dataclasses import dataclass

Shape = tuple[int | None, ...]
"""sizes; None: any"""


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor; without a shape where the file does not state it."""

    name: str
    dtype: str
    shape: Shape | None

    @property
    def text(self) -> str:
        """'float32 [batch, 4]'."""
        return f"{self.dtype} {'of any shape' if self.shape is None else shape_text(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Inputs and outputs of a model, in the order of its arguments and results."""

    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    batched: bool
    """the first dimension of every input and output counts independent rows"""
    fixed_rows: int | None = None
    """the exact number of rows that the file takes; none: any number"""
    max_rows: int | None = None
    """the largest number of rows that the file takes; none: no limit"""
    why_not_batched: str = ""


def fixed_schema(inputs: tuple[Field, ...], outputs: tuple[Field, ...]) -> Schema:
    """The schema of a file that fixes all shapes: it is batched where all first dimensions have one size."""
    firsts = {field.shape[0] if field.shape else None for field in (*inputs, *outputs)}
    if len(firsts) == 1 and None not in firsts:
        return Schema(inputs=inputs, outputs=outputs, batched=True, fixed_rows=firsts.pop())
    why_not = "inputs and outputs have no common first dimension"
    return Schema(inputs=inputs, outputs=outputs, batched=False, why_not_batched=why_not)
