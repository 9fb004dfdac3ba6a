"""A folder of any store that fsspec reaches: s3://, gs://, abfs://, hdfs://, https://, memory:// and so on.

fsspec is imported only when a URL is used; what a store raises becomes one line that names the file.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from armillary.errors import ArmillaryError, BadData, MissingPart, missing, one_line

_AT_ONCE = 16
"""requests to a web server"""
_PIECE = 1 << 22


def is_url(text: str) -> bool:
    return "://" in text


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A folder in a store; the URL has no slash at its end."""

    url: str

    def __str__(self) -> str:
        return self.url

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str) -> Iterator[bytes]:
        """A file of the folder, piece by piece."""
        with self._file_system(name) as (system, path), system.open(path, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file from `offset` on; fewer where it ends before."""
        with self._file_system(name) as (system, path):
            content: bytes = system.cat_file(path, start=offset, end=offset + size)
            return content

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where the store does not report it."""
        with self._file_system(name) as (system, path):
            size = system.info(path).get("size")
            return None if size is None else int(size)

    def facts(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Size (0 where the store does not report it) and version of many files."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda name: (self.size(name) or 0, self.version(name)), names))

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Bytes of many files, by one listing where the store has listings; one that is missing is named."""
        if self.url.startswith(("http://", "https://")):
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                return dict(zip(names, pool.map(self.size, names), strict=True))
        with self._file_system("", shown=".") as (system, root):
            listed = system.find(root, detail=True).items()
            sizes = {path.removeprefix(root).lstrip("/"): about["size"] for path, about in listed}
        for name in names:
            if name not in sizes:
                raise _missing(self.address(name))
        return {name: sizes[name] for name in names}

    def version(self, name: str) -> str:
        """A text that changes when the file does, as far as the store reports it."""
        with self._file_system(name) as (system, path):
            return str(system.ukey(path))

    def exists(self, name: str) -> bool:
        with self._file_system(name) as (system, path):
            return bool(system.exists(path))

    def matching(self, pattern: str) -> list[str]:
        """Names of files below the folder that match a pattern (`**` for all), sorted."""
        with self._file_system("", shown=pattern) as (system, root):
            root = root.rstrip("/")
            paths = system.find(root) if pattern == "**" else system.glob(f"{root}/{pattern}")
            return sorted(path.removeprefix(root).lstrip("/") for path in map(str, paths))

    @contextmanager
    def _file_system(self, name: str, shown: str = "") -> Iterator[tuple[Any, str]]:
        """fsspec's file system and the path of a file in it (of the folder for no name); errors of a store become one
        line with the name, or what is `shown` instead."""
        try:
            import fsspec
        except ImportError:
            raise missing("fsspec", f"reading {self.url}", "data") from None
        try:
            yield fsspec.core.url_to_fs(self.address(name) if name else self.url)
        except ArmillaryError:
            raise
        except ImportError as error:  # fsspec knows the scheme, but its package is not there
            raise MissingPart(f"reading {self.url} needs another package ({one_line(error, 200)})") from None
        except Exception as error:  # every store has its own tree of errors
            raise self._plain(error, shown or name) from error

    def _plain(self, error: BaseException, name: str) -> ArmillaryError:
        """In one line. fsspec says "not found" of a web server that cannot be reached, too; the cause tells."""
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404:
            return _missing(self.address(name))
        why = f"{type(cause).__name__}: {one_line(cause, 200)}"
        return ArmillaryError(f"cannot read {self.address(name)} ({why}); check the address and access")


def _missing(address: str) -> BadData:
    return BadData(f"{address} is missing; check the address, or upload it again")
