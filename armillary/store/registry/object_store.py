"""Where a registry's files are: a folder, or any store of fsspec that can create an object exclusively.

Everything that writers compete for (the next version, the next move of an alias) is a new file that is created only if
its name is free. Of many writers at once one succeeds, and the others read again. Local file systems have that as a
hard link, S3 as `If-None-Match: *`, Google Cloud Storage as `ifGenerationMatch=0`, Azure as `overwrite=False`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from armillary.errors import ArmillaryError, BadInput, MissingPart, missing, one_line
from armillary.store.atomic import create_bytes, plain_errors, staged_file
from armillary.store.lock import locked

Count = Callable[[int], None]
"""called with the number of bytes just copied"""
_BLOCK = 1 << 20
_REFUSALS = ("PreconditionFailed", "ConditionNotMet", "ConditionalRequestConflict", "AlreadyExists", "ResourceExists")
_EXCLUSIVE: Mapping[str, Mapping[str, Any]] = {
    "s3": {"mode": "create"},
    "s3a": {"mode": "create"},
    "gs": {"mode": "create"},
    "gcs": {"mode": "create"},
    "abfs": {"overwrite": False},
    "az": {"overwrite": False},
    "memory": {"mode": "create"},
}
"""how a store's fsspec class is asked to create an object only where none exists"""


class ObjectStore(Protocol):
    """The few operations that a registry needs; paths are relative and use slashes."""

    url: str

    def read(self, path: str) -> bytes | None:
        """The content of a file; None where it does not exist."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file; False where it exists already."""

    def queue(self, folder: str) -> AbstractContextManager[None]:
        """Wait for other writers of a folder on this machine, where that can save failed attempts to `create`."""

    def names(self, folder: str) -> list[str]:
        """Names directly inside a folder, sorted; none where it does not exist."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where it does not exist."""

    def put(self, source: Path, path: str, count: Count) -> None:
        """Copy a local file to the store: complete or not at all."""

    def get(self, path: str, target: Path, count: Count) -> None:
        """Copy a file of the store to a new local file."""

    def remove(self, path: str) -> None:
        """Delete a file; one that is missing is no error."""


def open_store(place: str | Path) -> ObjectStore:
    """The store at a folder or URL."""
    text = str(place)
    if text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://")))
    return FsspecStore(text) if "://" in text else LocalStore(Path(text).expanduser())


class LocalStore:
    """A folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)

    def read(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def create(self, path: str, data: bytes) -> bool:
        target = self.root / path
        return not target.exists() and create_bytes(target, data)

    def queue(self, folder: str) -> AbstractContextManager[None]:
        return locked(self.root / folder / ".lock")

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        target = self.root / path
        return target.stat().st_size if target.is_file() else None

    def put(self, source: Path, path: str, count: Count) -> None:
        with staged_file(self.root / path) as partial:
            _copy(source, partial, count)
            partial.chmod(0o444)

    def get(self, path: str, target: Path, count: Count) -> None:
        with plain_errors(target):
            _copy(self.root / path, target, count)

    def link(self, path: str, target: Path) -> bool:
        """A second name for a file of the store; False where the file system has none."""
        try:
            os.link(self.root / path, target)
        except OSError:
            return False
        return True

    def remove(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)


def _copy(source: Path, target: Path, count: Count) -> None:
    with source.open("rb") as from_file, target.open("wb") as to_file:
        while block := from_file.read(_BLOCK):
            to_file.write(block)
            count(len(block))


class FsspecStore:
    """A folder of any store that fsspec reaches; written only where the store creates exclusively."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.scheme = url.partition("://")[0]
        self._system, self._root = _file_system(self.url)
        self._lock = threading.Lock()  # fsspec's memory store checks and creates in two steps

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def read(self, path: str) -> bytes | None:
        with self._plain(path):
            try:
                return bytes(self._system.cat_file(self._path(path)))
            except FileNotFoundError:
                return None

    def create(self, path: str, data: bytes) -> bool:
        how = _EXCLUSIVE.get(self.scheme)
        if how is None:
            options = ", ".join(f"{name}://" for name in ("file", "s3", "gs", "abfs"))
            raise BadInput(f"{self.scheme}:// cannot create a file exclusively, which a registry needs; use {options}")
        with self._plain(path), self._lock:
            try:
                self._system.pipe_file(self._path(path), data, **how)
            except FileExistsError:
                return False
            except Exception as error:  # where the class reports the store's own refusal
                if not _is_refusal(error):
                    raise
                return False
            return True

    def queue(self, folder: str) -> AbstractContextManager[None]:
        return nullcontext()

    def names(self, folder: str) -> list[str]:
        with self._plain(folder):
            self._system.invalidate_cache()
            try:
                listed = self._system.ls(self._path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(name for path in listed if (name := str(path).rstrip("/").rpartition("/")[2]))

    def size(self, path: str) -> int | None:
        with self._plain(path):
            try:
                self._system.invalidate_cache()
                return int(self._system.info(self._path(path))["size"])
            except FileNotFoundError:
                return None

    def put(self, source: Path, path: str, count: Count) -> None:
        with self._plain(path):
            self._system.put_file(str(source), self._path(path))
            count(source.stat().st_size)

    def get(self, path: str, target: Path, count: Count) -> None:
        with self._plain(path), self._system.open(self._path(path), "rb") as from_file, target.open("wb") as to_file:
            while block := from_file.read(_BLOCK):
                to_file.write(block)
                count(len(block))

    def remove(self, path: str) -> None:
        with self._plain(path):
            try:
                self._system.rm_file(self._path(path))
            except FileNotFoundError:
                return

    @contextmanager
    def _plain(self, path: str) -> Iterator[None]:
        """Errors of a store, each of which has its own tree, in one line."""
        try:
            yield
        except ArmillaryError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error, 200)}"
            raise ArmillaryError(
                f"the store fails at {self.url}/{path} ({why}); check the address and access"
            ) from error


def _is_refusal(error: BaseException) -> bool:
    """Whether a store answered 409 or 412: the object exists, or is being written."""
    response = getattr(error, "response", None)  # botocore
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    numbers = (getattr(error, "code", None), getattr(error, "status_code", None))  # gcsfs, Azure
    names = (type(error).__name__, str(code), str(getattr(error, "error_code", "")))
    return any(number in (409, 412, "409", "412") for number in numbers) or any(
        sign in name for name in names for sign in _REFUSALS
    )


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise missing("fsspec", f"a registry in {url}", "data") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
        return system, path.rstrip("/")
    except ImportError as error:  # fsspec knows the scheme, but its package is not there
        raise MissingPart(f"a registry in {url} needs another package: {one_line(error, 200)}") from None
    except ValueError as error:
        raise BadInput(f"{url} is no store ({one_line(error, 200)}); try s3://… or a folder") from None
