"""Weights and AdamW states of parameters on the host or in a mapped file, and the slices in which they are stepped."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armillary.parallel.ddp import local_of
from armillary.parallel.host_memory import HostMemory, MappedFile

STATES = ("exp_avg", "exp_avg_sq")
SLICE = 1 << 25
"""numbers that are stepped together: enough for all cores, few compared with a model"""
_ALIGNED = 1 << 12


@dataclass(frozen=True, kw_only=True)
class ParameterSpan:
    """Some numbers of one parameter; they are at `at` in the slice's buffer."""

    parameter: nn.Parameter
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Slice:
    """What is stepped together."""

    pieces: tuple[ParameterSpan, ...]

    @property
    def size(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)

    @cached_property
    def parameters(self) -> set[nn.Parameter]:
        return {piece.parameter for piece in self.pieces}


def slices_of(parameters: Iterable[nn.Parameter], most: int = SLICE) -> list[Slice]:
    """This rank's numbers of all parameters, in order, `most` at a time."""
    slices: list[list[ParameterSpan]] = [[]]
    used = 0
    for parameter in parameters:
        begin, count = 0, local_of(parameter).numel()
        while begin < count:
            if used == most:
                slices.append([])
                used = 0
            end = min(count, begin + most - used)
            slices[-1].append(ParameterSpan(parameter=parameter, begin=begin, end=end, at=used))
            used, begin = used + end - begin, end
    return [Slice(tuple(pieces)) for pieces in slices if pieces]


class HostStates:
    """`of(parameter, "weight")` and its AdamW states by name, flat and in fp32 at least."""

    def __init__(self, parameters: Sequence[nn.Parameter], memory: HostMemory, folder: Path | None) -> None:
        """Weights as they are on the device, states of zeros."""
        self._names = ("weight", *STATES)
        self._places, size = _places(parameters, self._names)
        self._file = None if folder is None else MappedFile(folder, size)
        self._reader = None if folder is None else ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._tensors: dict[tuple[nn.Parameter, str], Tensor] = {}
        for (parameter, name), begin in self._places.items():
            count, dtype = local_of(parameter).numel(), widest([parameter])
            self._tensors[parameter, name] = (
                memory.lasting(count, dtype)
                if self._file is None
                else memory.adopt(self._file.tensor(begin, count, dtype))
            )
        with torch.no_grad():
            for parameter in parameters:
                self._tensors[parameter, "weight"].copy_(flat(parameter))

    @property
    def file_bytes(self) -> int:
        return 0 if self._file is None else self._file.bytes

    def of(self, parameter: nn.Parameter, name: str) -> Tensor:
        return self._tensors[parameter, name]

    def prefetch(self, slice_: Slice) -> None:
        """Begin to read the slice that is stepped next."""
        if self._file is not None and self._reader is not None:
            for span in self._spans(slice_):
                self._reader.submit(self._file.prefetch, *span)

    def release(self, slice_: Slice) -> None:
        if self._file is not None:
            for span in self._spans(slice_):
                self._file.release(*span)

    def _spans(self, slice_: Slice) -> Iterator[tuple[int, int]]:
        """(first byte, byte after the last) of all that belongs to it."""
        for piece in slice_.pieces:
            for name in self._names:
                begin, size = self._places[piece.parameter, name], self.of(piece.parameter, name).element_size()
                yield begin + piece.begin * size, begin + piece.end * size


def _places(
    parameters: Iterable[nn.Parameter], names: Sequence[str]
) -> tuple[dict[tuple[nn.Parameter, str], int], int]:
    """The offset of each in a file, and the file's size."""
    places, at = {}, 0
    for parameter in parameters:
        for name in names:
            places[parameter, name] = at
            size = local_of(parameter).numel() * widest([parameter]).itemsize
            at += -(-size // _ALIGNED) * _ALIGNED
    return places, at


def widest(parameters: Iterable[Tensor]) -> torch.dtype:
    """What sums are taken in: fp32 at least."""
    return reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)


def flat(parameter: Tensor) -> Tensor:
    """This rank's numbers, one after the other."""
    return local_of(parameter.detach()).view(-1)


def sharded_as(values: Tensor, parameter: Tensor) -> Tensor:
    """Numbers of this rank with the shape and the sharding of the parameter."""
    shaped = values.view(local_of(parameter).shape)
    return DTensor(shaped, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else shaped
