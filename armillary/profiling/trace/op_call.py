"""One operator call of a trace: its tensor arguments, their dtypes, and its scalar arguments as text."""

from dataclasses import dataclass
from itertools import chain
from math import prod

from armillary.profiling.trace.trace import Signature
from armillary.spec.arithmetic.ops import Op, OpKind

_TYPES = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("int8", 1),
    "bool": ("int8", 1),
    "int": ("fp32", 4),
    "long int": ("fp32", 8),
    "long": ("fp32", 8),
    "short": ("fp16", 2),
    "c10::complex<float>": ("fp32", 8),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
    "c10::Float8_e4m3fnuz": ("fp8", 1),
}
"""torch's name -> (dtype, bytes per element); integers outside the matrix units count as fp32"""
LIST = "TensorList"
"""type of a list of tensors: torch does not tell theirs; our recordings do ('TensorList float')"""
_LARGEST = 1 << 48
"""more elements along a dim than any tensor has"""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor argument."""

    shape: Shape
    dtype: str = "fp32"
    size: float = 4
    stored: int | None = None
    """elements that lie in memory, where they are fewer than the shape says (an expanded tensor)"""

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> float:
        """Bytes read."""
        return (self.count if self.stored is None else self.stored) * self.size

    @property
    def full_bytes(self) -> float:
        """Bytes written by an output of this size."""
        return self.count * self.size


@dataclass(frozen=True)
class Call:
    """An operator's arguments."""

    name: str
    args: tuple[Tensor | tuple[Tensor, ...] | None, ...]
    """a tensor, a list of tensors, or None for what is no tensor"""
    concrete: tuple[str, ...]

    def has_tensor(self, index: int) -> bool:
        return index < len(self.args) and isinstance(self.args[index], Tensor)

    def tensor(self, index: int) -> Tensor:
        value = self.args[index] if index < len(self.args) else None
        if not isinstance(value, Tensor):
            raise NoModel
        return value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, lists flattened."""
        lists = (arg if isinstance(arg, tuple) else (arg,) for arg in self.args if arg is not None)
        return tuple(chain.from_iterable(lists))

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

    def op(self, kind: OpKind, flops: float, read: float, written: float, dtype: str = "") -> Op:
        return Op(
            name=self.name,
            kind=kind,
            flops=flops,
            bytes_read=read,
            bytes_written=written,
            dtype=dtype or self.tensors[0].dtype,
        )


class NoModel(Exception):
    """The arguments are not what the rule expects."""


def call_of(name: str, signature: Signature, list_type: str = "float") -> Call:
    """`list_type` is the assumed element type of tensor lists where the trace does not say."""
    args = tuple(_argument(signature, i, list_type) for i in range(len(signature.dims)))
    return Call(name, args, signature.concrete)


def assumed_size(signature: Signature, list_type: str = "float") -> float:
    """Bytes per element that a list of tensors was assumed to have; 0 where nothing was assumed."""
    lists = any(kind == LIST and dims for kind, dims in zip(signature.types, signature.dims, strict=False))
    return _TYPES[list_type][1] if lists else 0


def floats_of(signature: Signature) -> dict[str, int]:
    """Floating-point type -> elements of the tensors that have it."""
    counts: dict[str, int] = {}
    for dims, kind in zip(signature.dims, signature.types, strict=False):
        if kind in ("float", "double", "c10::BFloat16", "c10::Half") and _is_shape(dims):
            counts[kind] = counts.get(kind, 0) + prod(dims)
    return counts


def _argument(signature: Signature, index: int, list_type: str) -> Tensor | tuple[Tensor, ...] | None:
    dims = signature.dims[index]
    kind = signature.types[index] if index < len(signature.types) else "float"
    if not isinstance(dims, tuple):
        return None
    if dims and isinstance(dims[0], tuple):
        number = _TYPES.get(kind.removeprefix(LIST).strip(), _TYPES[list_type])
        return tuple(Tensor(tuple(shape), *number) for shape in dims if _is_shape(shape))
    if kind not in _TYPES or not _is_shape(dims):
        return None
    return Tensor(tuple(dims), *_TYPES[kind], _stored(signature, index, dims))


def _is_shape(dims: object) -> bool:
    """Sizes that a tensor can have; a broken trace may hold anything."""
    return isinstance(dims, tuple) and all(isinstance(n, int) and 0 <= n < _LARGEST for n in dims) and len(dims) < 16


def _stored(signature: Signature, index: int, dims: Shape) -> int | None:
    strides = signature.strides[index] if index < len(signature.strides) else ()
    if not isinstance(strides, tuple) or len(strides) != len(dims) or 0 not in strides:
        return None
    return prod(n for n, step in zip(dims, strides, strict=True) if step != 0)
