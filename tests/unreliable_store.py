"""A store of fsspec's that fails every third write: unreliable:///folder."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem


class UnreliableFileSystem(LocalFileSystem):
    protocol = "unreliable"
    writes = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        plain = [each.removeprefix("unreliable://") for each in ([path] if isinstance(path, str) else path)]
        return super()._strip_protocol(plain[0] if isinstance(path, str) else plain)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        type(self).writes += 1
        if type(self).writes % 3 == 0:
            raise ConnectionError("the store is busy")
        super().pipe_file(path, value, mode=mode, **options)
