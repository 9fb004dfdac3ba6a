"""What the readers of published formats share: tensors of a folder by name, and checks of their shapes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Tensors of a model folder; remembers which were read."""

    has: Callable[[str], bool]
    read: Callable[[str], Tensor]
    used: set[str] = field(default_factory=set)

    def get(self, name: str, *dtypes: torch.dtype) -> Tensor:
        """The tensor, of one of these dtypes; any where none is given."""
        if not self.has(name):
            raise BadModel(f"{name} is missing beside its packed weight; fetch the model again")
        self.used.add(name)
        tensor = self.read(name)
        if dtypes and tensor.dtype not in dtypes:
            kind, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtypes[0]))
            raise BadModel(f"{name} is {kind} where its format says {wanted}; fetch the model again")
        return tensor

    def skip(self, *names: str) -> None:
        """Names that need not be read, such as scales of activations."""
        self.used.update(name for name in names if self.has(name))


def is_count(value: Any, most: float = math.inf) -> bool:
    """Whether a field of a config is a whole number from 1 to `most`."""
    return type(value) is int and 1 <= value <= most


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: Tensor, *wanted: int) -> Tensor:
    if tuple(tensor.shape) != wanted:
        raise BadModel(
            f"{name} has shape {list(tensor.shape)} where the format says {list(wanted)}; config.json and weights are "
            "not of one model"
        )
    return tensor
