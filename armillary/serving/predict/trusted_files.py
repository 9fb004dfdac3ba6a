"""Which model files may be loaded: .pt2 and TorchScript can hold code, so only files that `convert` wrote by default.

Files that need pickle are never loaded, because unpickling runs their code. ONNX files and weights hold no code.
"""

import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO

from armillary.errors import BadModel
from armillary.store.home import Home
from armillary.store.manifest import sha256
from armillary.store.trusted_conversions import is_known


class FileTrust:
    """The files that a server may load."""

    def __init__(self, home: Home, *, every_file: bool = False) -> None:
        """`every_file`: the user trusts the file and its later versions (--trust)."""
        self._home = home
        self._every_file = every_file

    def check(self, file: Path) -> None:
        """BadModel where `file` must not be loaded."""
        if file.suffix == ".onnx":
            return
        if needs_pickle(file):
            raise BadModel(
                f"{file} needs pickle, which runs code when it is read; export the module with "
                "armillary convert FILE.py:NAME model.pt2 --to pt2"
            )
        if self._every_file or (file.suffix == ".pt" and not _is_script(file)):  # weights alone hold no code
            return
        if not is_known(self._home, sha256(file)):
            raise BadModel(
                f"{file} was not written by armillary convert here and can hold code; add --trust to serve it anyway"
            )


def needs_pickle(file: Path) -> bool:
    """Whether loading `file` unpickles anything but tensors and plain values."""
    if not zipfile.is_zipfile(file):
        return file.suffix == ".pt"  # a pickle without an archive; a .pt2 of this kind cannot be loaded at all
    if file.suffix == ".pt":
        return not _is_script(file) and not _is_weights(file)  # torch loads TorchScript with its own C++ reader
    with zipfile.ZipFile(file) as archive:
        declared = _declared(archive)
        return any(_member_needs_pickle(archive, info, declared) for info in archive.infolist())


def _is_script(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return any(name.rsplit("/", 1)[-1] == "constants.pkl" for name in archive.namelist())


def _declared(archive: zipfile.ZipFile) -> set[str]:
    """Names of the weights and constants that torch.export has pickled, from the archive's tables."""
    names: set[str] = set()
    for name in archive.namelist():
        if name.endswith("_config.json"):
            entries = json.loads(archive.read(name)).get("config", {}).values()
            names |= {str(entry.get("path_name")) for entry in entries if entry.get("use_pickle")}
    return names


def _member_needs_pickle(archive: zipfile.ZipFile, info: zipfile.ZipInfo, declared: set[str]) -> bool:
    with archive.open(info) as member:
        head = member.read(2)
    if head == b"PK":  # an archive of torch.save
        return not _is_weights(BytesIO(archive.read(info)))
    return bool(head) and (info.filename.endswith((".pt", ".pkl")) or info.filename.rsplit("/", 1)[-1] in declared)


def _is_weights(file: Path | IO[bytes]) -> bool:
    """Whether torch.load(weights_only=True), which runs no code, can read it."""
    import torch

    try:
        torch.load(file, weights_only=True, map_location="meta")
    except Exception:  # it raises anything on an unknown file
        return False
    return True
