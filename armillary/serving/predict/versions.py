"""Model files and their versions: one file that may be replaced, or a folder of numbered version folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadModel, NotFound

SUFFIXES = (".pt2", ".pt", ".onnx")


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version as it lies on disk."""

    file: Path
    """the model"""
    name: str
    """number of its folder, or of the time it was written"""
    mark: tuple[int, int, int]
    """inode, time of writing and size: another mark is another version"""


def is_model_file(path: Path) -> bool:
    """Whether `path` is for the predict server: a model file, or a folder of versions of one."""
    if path.is_dir():
        return bool(_versions(path))
    return path.suffix in SUFFIXES


def newest(path: Path) -> Release:
    """The version to serve: the file, or that of the highest number."""
    if path.is_dir():
        found = _versions(path)
        if not found:
            raise NotFound(f"{path} has no version folder with a model; write it like {path / '1' / 'model.pt2'}")
        number = max(found)
        return _release(found[number], str(number))
    if not path.exists():
        raise NotFound(f"no model file '{path}'; armillary convert MODEL {path} --to pt2 makes one")
    return _release(path, "")


def _release(file: Path, name: str) -> Release:
    stat = file.stat()
    mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return Release(file=file, name=name or f"{stat.st_mtime_ns // 1_000_000:x}", mark=mark)


def _versions(folder: Path) -> dict[int, Path]:
    """Number -> model file, of the folders named by a number."""
    found = {}
    for inner in folder.iterdir():
        if inner.name.isdecimal() and inner.is_dir():
            models = sorted(file for file in inner.iterdir() if file.suffix in SUFFIXES)
            if len(models) > 1:
                raise BadModel(f"{inner} holds {len(models)} models; keep one in each version folder")
            if models:
                found[int(inner.name)] = models[0]
    return found
