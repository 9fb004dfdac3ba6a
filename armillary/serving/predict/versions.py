"""Versions of a model file: one file that may be replaced, or a folder of numbered version folders."""

from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadModel, NotFound

SUFFIXES = (".pt2", ".pt", ".onnx")


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A version on disk, by the number of its folder or its modification time."""

    file: Path
    name: str
    mark: tuple[int, int, int]
    """inode, modification time and size: a different mark is a different version"""


def is_model_file(path: Path) -> bool:
    """Whether `path` is a model file or a folder of versions, for the predict server."""
    return bool(_versions(path)) if path.is_dir() else path.suffix in SUFFIXES


def newest(path: Path) -> ModelVersion:
    """The version to serve: the file, or that of the highest number."""
    if path.is_dir():
        versions = _versions(path)
        if not versions:
            raise NotFound(f"{path} has no version folder with a model; write it like {path / '1' / 'model.pt2'}")
        number = max(versions)
        return _version(versions[number], str(number))
    if not path.exists():
        raise NotFound(f"no model file '{path}'; armillary convert MODEL {path} --to pt2 writes one")
    return _version(path, "")


def _version(file: Path, name: str) -> ModelVersion:
    stat = file.stat()
    mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return ModelVersion(file=file, name=name or f"{stat.st_mtime_ns // 1_000_000:x}", mark=mark)


def _versions(folder: Path) -> dict[int, Path]:
    """Number -> model file, of the folders named by a number."""
    versions = {}
    for inner in folder.iterdir():
        if inner.name.isdecimal() and inner.is_dir():
            models = sorted(file for file in inner.iterdir() if file.suffix in SUFFIXES)
            if len(models) > 1:
                raise BadModel(f"{inner} holds {len(models)} models; keep one in each version folder")
            if models:
                versions[int(inner.name)] = models[0]
    return versions
