"""Copies checkpoints to and from any store that fsspec reaches, in parts, so that an upload that broke off goes on.

    URL/RUN/STEP/FILE.00000.HASH   parts of at most 64 MiB, named after their content
    URL/RUN/STEP/manifest.json     the checkpoint's manifest with the parts of each file, and what retention has to
                                   know; written last

A part that is there in full length is not sent again. Torch is not needed.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from armillary.errors import ArmillaryError, BadData, MissingPart, missing, one_line
from armillary.store import nan_safe_json

PART = 64 << 20
RETRIES_S = (0.5, 2.0, 8.0, 30.0)
"""waits before a request to the store is tried again"""
MANIFEST = "manifest.json"
_PERMANENT = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)


class StoreFails(ArmillaryError):
    """A store that does not answer, or refuses, after several tries."""


class Part(NamedTuple):
    """A part of a file in the store."""

    name: str
    bytes: int
    sha256: str


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise missing("fsspec", f"checkpoints in {url}", "data") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
        return system, path.rstrip("/")
    except ImportError as error:  # fsspec knows the scheme, but its package is not there
        raise MissingPart(f"checkpoints in {url} need another package ({one_line(error, 200)})") from None
    except ValueError as error:
        raise ArmillaryError(f"{url} is no store ({one_line(error, 200)}); try file:///… or s3://…") from None


def upload_files(url: str, paths: Sequence[str]) -> dict[str, list[Part]]:
    """Send files into a folder of a store; returns the parts of each. StoreFails after several tries."""
    system, root = file_system(url)
    retried(url, lambda: system.makedirs(root, exist_ok=True))
    return {Path(path).name: [_send(system, url, root, part) for part in _parts(Path(path))] for path in paths}


def write_manifest(
    url: str, manifest: dict[str, Any], parts: dict[str, list[Part]], retention: dict[str, Any] | None = None
) -> None:
    """The last file of a checkpoint in a store, which makes it complete; `retention` is what its rules ask for."""
    write_json(f"{url}/{MANIFEST}", manifest | {"parts": parts, "retention": retention or {}})


def complete_steps(url: str) -> list[int]:
    """Steps of the complete checkpoints in a run's folder, in order."""
    return _numbers(Path(path).parent.name for path in _listed(url, f"*/{MANIFEST}"))


def begun_steps(url: str) -> list[int]:
    """Steps of all checkpoints in a run's folder, in order, also where an upload broke off."""
    return _numbers(folder_names(url))


def folder_names(url: str, *, retries_s: Sequence[float] | None = None) -> list[str]:
    """What is directly in a folder of a store."""
    return [Path(path).name for path in _listed(url, "*", retries_s)]


def remove(url: str) -> None:
    """Delete a checkpoint: its manifest first, so that no half of it counts."""
    system, root = file_system(url)
    if retried(url, lambda: system.exists(f"{root}/{MANIFEST}")):
        retried(url, lambda: system.rm_file(f"{root}/{MANIFEST}"))
    if retried(url, lambda: system.exists(root)):
        retried(url, lambda: system.rm(root, recursive=True))


def fetch(url: str, folder: Path) -> None:
    """Copy a checkpoint into an empty folder; every part is compared with its checksum."""
    system, root = file_system(url)
    manifest = read_json(f"{url}/{MANIFEST}") or {}
    if "parts" not in manifest:
        raise BadData(f"{url} has no manifest; remove that checkpoint there")
    manifest.pop("retention", None)
    for name, parts in manifest.pop("parts").items():
        with (folder / name).open("wb") as file:
            for part in (Part(*each) for each in parts):
                file.write(_receive(system, url, root, part))
    (folder / MANIFEST).write_text(nan_safe_json.dumps(manifest, indent=1) + "\n")


def read_json(url: str) -> dict[str, Any] | None:
    """The table in a small file of a store; None where there is no such file, BadData where it is torn."""
    system, path = file_system(url)

    def read() -> bytes | None:
        try:
            return bytes(system.cat_file(path))
        except FileNotFoundError:
            return None

    content = retried(url, read)
    try:
        return None if content is None else dict(nan_safe_json.loads(content))
    except (ValueError, TypeError) as error:
        raise BadData(f"{url} is torn ({one_line(error, 100)}); remove it there") from None


def write_json(url: str, table: dict[str, Any]) -> None:
    """A small file, at once: object stores do so, and on a disk it gets its name when it is complete."""
    from fsspec.implementations.local import LocalFileSystem

    system, path = file_system(url)
    content, on_disk = nan_safe_json.dumps(table).encode(), isinstance(system, LocalFileSystem)

    def write() -> None:
        system.makedirs(str(Path(path).parent), exist_ok=True)
        system.pipe_file(f"{path}.partial" if on_disk else path, content)
        if on_disk:
            system.mv(f"{path}.partial", path)

    retried(url, write)


def _listed(url: str, pattern: str, retries_s: Sequence[float] | None = None) -> list[str]:
    system, root = file_system(url)

    def paths() -> list[str]:
        system.invalidate_cache()
        return [str(path) for path in system.glob(f"{root}/{pattern}")]

    return list(retried(url, paths, retries_s))


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdigit())


def _parts(path: Path) -> Iterator[tuple[Part, bytes]]:
    with path.open("rb") as file:
        for number, content in enumerate(iter(lambda: file.read(PART), b"")):
            digest = hashlib.sha256(content).hexdigest()
            yield Part(f"{path.name}.{number:05}.{digest[:16]}", len(content), digest), content


def _send(system: Any, url: str, root: str, numbered: tuple[Part, bytes]) -> Part:
    part, content = numbered
    place = f"{root}/{part.name}"

    def send() -> None:
        if not (system.exists(place) and system.info(place)["size"] == part.bytes):
            system.pipe_file(place, content)

    retried(url, send)
    return part


def _receive(system: Any, url: str, root: str, part: Part) -> bytes:
    content: bytes = retried(url, lambda: system.cat_file(f"{root}/{part.name}"))
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise BadData(f"{part.name} in {url} is damaged; remove that checkpoint there")
    return content


def retried(url: str, request: Callable[[], Any], retries_s: Sequence[float] | None = None) -> Any:
    """What the request returns; it is tried again where the store fails, after these waits (RETRIES_S)."""
    for wait_s in (*(RETRIES_S if retries_s is None else retries_s), None):
        try:
            return request()
        except FileNotFoundError as error:
            raise BadData(f"{url} lacks a file ({one_line(error, 200)}); remove that checkpoint there") from error
        except Exception as error:  # every store has its own tree of errors
            if wait_s is None or isinstance(error, _PERMANENT):
                why = f"{type(error).__name__}: {one_line(error, 200)}"
                raise StoreFails(f"the store {url} fails ({why}); check the address and access") from error
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")
