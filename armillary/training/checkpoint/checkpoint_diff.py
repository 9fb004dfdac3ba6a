"""How two checkpoints differ: tensor by tensor, and in their facts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from armillary.parallel.consensus import Consensus
from armillary.store.progress import Progress, silent
from armillary.training.checkpoint.checkpoint import open_reader, read_facts, read_tensors

Shape = tuple[torch.Size, torch.dtype]
_AT_ONCE = 1 << 30
"""bytes of tensors that are read together"""


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """A tensor in two checkpoints: ‖b − a‖ / ‖a‖ in fp64, and the largest difference of one number. None: it is in only
    one of them, or has another shape."""

    name: str
    relative: float | None
    largest: float | None
    note: str = ""


def tensor_shapes(folder: Path) -> dict[str, Shape]:
    """Name -> shape and dtype of the tensors of a checkpoint."""
    listed = open_reader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.size, about.properties.dtype)
        for name, about in listed.items()
        if isinstance(about, TensorStorageMetadata)
    }


def compare(first: Path, second: Path, progress: Progress = silent) -> Iterator[TensorChange]:
    """Every tensor of both, a gigabyte at a time."""
    ours, theirs = tensor_shapes(first), tensor_shapes(second)
    for name in sorted(set(ours) ^ set(theirs)):
        yield TensorChange(
            name=name, relative=None, largest=None, note=f"only in {(first if name in ours else second).name}"
        )
    both = {name: ours[name] for name in sorted(set(ours) & set(theirs))}
    done, total = 0, sum(size.numel() * dtype.itemsize for size, dtype in both.values())
    for group in _groups({name: about for name, about in both.items() if ours[name] == theirs[name]}):
        before, after = _read(first, group), _read(second, group)
        for name in group:
            yield _change(name, before[name], after[name])
        done += sum(value.nbytes for value in before.values())
        progress(done, total)
    for name in both:
        if ours[name] != theirs[name]:
            yield TensorChange(name=name, relative=None, largest=None, note="another shape or dtype")


def changed_facts(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """Key of state.json -> both values, where they differ."""
    ours, theirs = read_facts(first), read_facts(second)
    return {
        key: (ours.get(key), theirs.get(key))
        for key in sorted(set(ours) | set(theirs))
        if ours.get(key) != theirs.get(key)
    }


def _groups(
    tensors: Mapping[str, Shape],
) -> Iterator[dict[str, Shape]]:
    group: dict[str, Shape] = {}
    group_bytes = 0
    for name, (size, dtype) in tensors.items():
        group[name] = size, dtype
        group_bytes += size.numel() * dtype.itemsize
        if group_bytes >= _AT_ONCE:
            yield group
            group, group_bytes = {}, 0
    if group:
        yield group


def _read(folder: Path, group: Mapping[str, Shape]) -> dict[str, Tensor]:
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in group.items()}
    read_tensors(folder, tensors, Consensus(rank=0, size=1))
    return tensors


def _change(name: str, before: Tensor, after: Tensor) -> TensorChange:
    before = before.double()
    difference = (after.double() - before).abs()
    norm = float(before.norm())
    relative = float(difference.norm()) / norm if norm else float(difference.norm() > 0)
    return TensorChange(name=name, relative=relative, largest=float(difference.max()) if difference.numel() else 0.0)
