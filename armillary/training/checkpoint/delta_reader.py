"""Reads a checkpoint that is stored as a delta of a full one, for any layout."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from armillary.training.checkpoint import delta


class DeltaReader(dcp.FileSystemReader):
    """torch's reader, for the files of `folder` together with those of `base`."""

    def __init__(self, folder: Path, base: Path) -> None:
        super().__init__(folder)
        self._folder, self._base = folder, base
        self._base_storage: dict[MetadataIndex, Any] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **options)
        self._base_storage = dcp.FileSystemReader(self._base).read_metadata().storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            tensor = self._read(index)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_box(tensor, item))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, index: MetadataIndex) -> Tensor:
        base = self._base_tensor(index)
        raw = base.view(-1).view(torch.uint8) if base.ndim else base.view(1).view(torch.uint8)
        about = self.storage_data[index]
        content = _slice(self._folder / about.relative_path, about.offset, about.length)
        decoded = delta.decode(content, lambda begin, end: raw[begin:end].numpy().tobytes(), len(raw), base.itemsize)
        return torch.frombuffer(decoded, dtype=base.dtype).view(base.shape)

    def _base_tensor(self, index: MetadataIndex) -> Tensor:
        about = self._base_storage[index]
        with (self._base / about.relative_path).open("rb") as file:
            tensor: Tensor = torch.load(self._slice_file(file, about), map_location="cpu", weights_only=True)
        return tensor


def _slice(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _box(tensor: Tensor, item: ReadItem) -> Tensor:
    """The part of a stored tensor that is read."""
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor
