"""The safetensors files of a model folder, read by tensor name; errors are one line each.

Nothing pickled is ever opened, and only plain floats are accepted: quantised weights have their own loaders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from armillary.errors import BadModel
from armillary.kernels.core.dtype import HF_NAMES
from armillary.store.hf_folder import weight_files

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """Where a tensor is on disk."""

    path: Path
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorFolder:
    """The safetensors files of a folder, opened lazily and read by tensor name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        self.files = self._index()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        files = [path.name for path in weight_files(self.folder)]
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not os.access(path, os.R_OK):
                raise BadModel(f"{path} may not be read; check its permissions")
            try:
                self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise BadModel(f"{path} is truncated or not safetensors ({error}); fetch it again") from None
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Iterator[str]:
        return iter(self.files)

    def dtype(self) -> torch.dtype:
        """Of the first tensor: the dtype of a folder whose config.json names none."""
        return self.read(next(iter(self.files))).dtype

    def read(self, name: str) -> Tensor:
        try:
            tensor = self._file(self.files[name]).get_tensor(name)
        except SafetensorError as error:
            raise BadModel(f"{self.folder}: tensor {name} cannot be read ({error}); fetch the model again") from None
        if tensor.dtype not in HF_NAMES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise BadModel(f"{self.folder}: {name} is {kind}, not a plain float; use the unquantised weights")
        return tensor

    def where(self, name: str) -> StoredTensor:
        """The location of a tensor, for callers that read it themselves."""
        file = self.files[name]
        if file not in self._headers:
            with open(self.folder / file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                self._headers[file] = (8 + size, json.loads(opened.read(size)))
        begin, header = self._headers[file]
        entry = header[name]
        if entry["dtype"] not in _FLOATS:
            self.read(name)  # raises with the reason
        return StoredTensor(
            self.folder / file, begin + entry["data_offsets"][0], torch.Size(entry["shape"]), _FLOATS[entry["dtype"]]
        )
