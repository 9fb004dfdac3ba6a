"""One call of an operator as a trace has it: the tensors it was given, their dtypes, and its numbers as text."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from armillary.profiling.trace import Signature

_TYPES = {
    "float": ("fp32", 4), "double": ("fp64", 8), "c10::BFloat16": ("bf16", 2), "c10::Half": ("fp16", 2),
    "signed char": ("int8", 1), "unsigned char": ("int8", 1), "bool": ("int8", 1), "int": ("fp32", 4),
    "long int": ("fp32", 8), "long": ("fp32", 8), "short": ("fp16", 2), "c10::complex<float>": ("fp32", 8),
    "c10::Float8_e4m3fn": ("fp8", 1), "c10::Float8_e5m2": ("fp8", 1), "c10::Float8_e4m3fnuz": ("fp8", 1),
}  # fmt: skip
"""torch's name -> arithmetic, bytes an element; integers outside the matrix units count as fp32"""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor argument."""

    shape: Shape
    dtype: str = "fp32"
    size: float = 4

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.count * self.size


@dataclass(frozen=True)
class Call:
    """An operator's arguments, sorted out."""

    name: str
    args: tuple[Tensor | tuple[Tensor, ...] | None, ...]
    """a tensor, a list of tensors, or None for what is no tensor"""
    concrete: tuple[str, ...]

    def tensor(self, index: int) -> Tensor:
        value = self.args[index] if index < len(self.args) else None
        if not isinstance(value, Tensor):
            raise NoModel
        return value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, lists opened."""
        flat: list[Tensor] = []
        for value in self.args:
            flat.extend(value if isinstance(value, tuple) else () if value is None else (value,))
        return tuple(flat)

    def lists(self) -> list[tuple[Tensor, ...]]:
        return [value for value in self.args if isinstance(value, tuple) and value]

    def flag(self, index: int) -> bool:
        return index < len(self.concrete) and self.concrete[index] == "True"

    def numbers(self, index: int) -> Shape:
        text = self.concrete[index].strip("[]() ") if index < len(self.concrete) else ""
        try:
            return tuple(int(part) for part in text.split(",")) if text else ()
        except ValueError:
            raise NoModel from None


class NoModel(Exception):
    """The arguments are not what the rule expects."""


def call_of(name: str, signature: Signature) -> Call:
    args = tuple(_argument(signature, i) for i in range(len(signature.dims)))
    return Call(name, args, signature.concrete)


def _argument(signature: Signature, index: int) -> Tensor | tuple[Tensor, ...] | None:
    dims = signature.dims[index]
    kind = signature.types[index] if index < len(signature.types) else "float"
    if not isinstance(dims, tuple):
        return None
    if dims and isinstance(dims[0], tuple):
        number = _TYPES.get(kind.removeprefix("TensorList").strip(), ("fp32", 4))  # torch does not tell: fp32
        return tuple(Tensor(tuple(shape), *number) for shape in dims if all(isinstance(n, int) for n in shape))
    if kind not in _TYPES or not all(isinstance(n, int) for n in dims):
        return None
    return Tensor(tuple(dims), *_TYPES[kind])
