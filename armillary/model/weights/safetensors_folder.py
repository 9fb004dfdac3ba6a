"""The safetensors files of a model folder, on disk or in a store, read by tensor name; errors are one line each.

Nothing pickled is ever opened. `read` and `where` accept plain floats only; `read_any` is for packed weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from armillary.errors import BadModel
from armillary.store.hf_folder import gguf_file, weight_files
from armillary.store.remote import Remote
from armillary.store.remote_model import remote_weight_files, weights_url
from armillary.store.safetensors_header import TensorEntry, parse_entries

_EMBEDDING = "embed_tokens.weight"  # without the "model." that it has in a model with a head
_TEXT_PART = "language_model."  # in front of the names of a text model that has a vision model beside it
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def _renamed(stored: Iterable[str]) -> dict[str, str]:
    """The names of a text model with a head -> those that are stored. Embedding models are saved without a head and
    without "model."; of a model with vision only the text part counts."""
    names = list(stored)
    if _EMBEDDING in names:
        return {f"model.{name}": name for name in names}
    inside = f"model.{_TEXT_PART}"
    if f"{inside}{_EMBEDDING}" in names:  # newer folders, whose head is outside
        own = (name for name in names if not name.startswith("model.") or name.startswith(inside))
        return {name.replace(inside, "model.", 1): name for name in own}
    text = {name.removeprefix(_TEXT_PART): name for name in names if name.startswith(_TEXT_PART)}
    return text if f"model.{_EMBEDDING}" in text else {name: name for name in names}


class StoredTensor(NamedTuple):
    """Where a tensor is on disk."""

    path: str  # file or address
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorFolder:
    """The safetensors files of a folder, opened lazily and read by tensor name."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder
        self.url = weights_url(folder)
        """where the weights are in a store; empty: in the folder"""
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, TensorEntry]] = {}
        self.files = self._index()
        self._stored_names = _renamed(self.files)
        """names here -> names in the files"""
        self.files = {name: self.files[stored] for name, stored in self._stored_names.items()}

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        if self.url:
            return {name: file for file in remote_weight_files(self.url) for name in self._header(file)}
        if (file := gguf_file(Path(self.folder))) is not None:
            raise BadModel(f"{file} is read by one process only; write plain weights with armillary convert")
        files = [path.name for path in weight_files(Path(self.folder))]
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = Path(self.folder) / name
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
        return self.where(next(iter(self.files))).dtype

    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(self._entry(name).nbytes for name in self.files)

    def is_plain(self, name: str) -> bool:
        """Whether it is stored, as plain floats."""
        return name in self.files and self._entry(name).dtype in _FLOATS

    def read(self, name: str) -> Tensor:
        self._refuse_packed(name)
        return self.read_any(name)

    def read_any(self, name: str) -> Tensor:
        """A tensor of any dtype."""
        if self.url:
            return self._fetch(self._where(name))
        try:
            return self._file(self.files[name]).get_tensor(self._stored_names[name])
        except SafetensorError as error:
            raise BadModel(f"{self.folder}: tensor {name} cannot be read ({error}); fetch the model again") from None

    def where(self, name: str) -> StoredTensor:
        """The location of a tensor, for callers that read it themselves."""
        self._refuse_packed(name)
        return self._where(name)

    def _refuse_packed(self, name: str) -> None:
        if (kind := self._entry(name).dtype) not in _FLOATS:
            kind = str(_OTHERS.get(kind, kind)).removeprefix("torch.")
            raise BadModel(
                f"{self.folder}: {name} is {kind}, not a plain float; write plain ones with armillary convert"
            )

    def _where(self, name: str) -> StoredTensor:
        file, entry = self.files[name], self._entry(name)
        if (dtype := (_FLOATS | _OTHERS).get(entry.dtype)) is None:
            raise BadModel(f"{self.folder}: {name} is {entry.dtype}, which is not known; take another format")
        path = f"{self.url}/{file}" if self.url else str(Path(self.folder) / file)
        return StoredTensor(path, entry.begin, torch.Size(entry.shape), dtype)

    def _entry(self, name: str) -> TensorEntry:
        return self._header(self.files[name])[self._stored_names[name]]

    def _header(self, file: str) -> dict[str, TensorEntry]:
        """What the file holds, and where."""
        if file not in self._headers:
            where = f"{self.url or self.folder}/{file}"
            self._headers[file] = parse_entries(lambda begin, size: self._bytes(file, begin, size), where)
        return self._headers[file]

    def _bytes(self, file: str, begin: int, size: int) -> bytes:
        if self.url:
            return Remote(url=self.url).read_range(file, begin, size)
        with open(Path(self.folder) / file, "rb") as opened:
            opened.seek(begin)
            return opened.read(size)

    def _fetch(self, stored: StoredTensor) -> Tensor:
        folder, _, file = stored.path.rpartition("/")
        content = Remote(url=folder).read_range(file, stored.offset, stored.nbytes)
        if len(content) < stored.nbytes:
            raise BadModel(f"{stored.path} ends too early; upload it again")
        if not content:
            return torch.empty(stored.shape, dtype=stored.dtype)
        return torch.frombuffer(bytearray(content), dtype=stored.dtype).view(stored.shape)
