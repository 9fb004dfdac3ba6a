"""Atomic writes of files and folders.

Content is written beside its target under a hidden name `.NAME.partial-…` and renamed into place. A killed process
leaves only the hidden name, which the next write of the same target removes.
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput
from armillary.store import nan_safe_json
from armillary.store.writer_process import Process

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOENT,
    errno.EBUSY,
    errno.EINVAL,
}

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class Taken(BadInput):
    """A target that exists already."""


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`: a reader sees the old file or the new one."""
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        partial = _partial(path)
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def create_bytes(path: Path, data: bytes) -> bool:
    """Create `path` with its complete content; False where it exists. Of many writers at once, one succeeds."""
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            created = _link_new(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _sync(path.parent)
        return created


def _link_new(source: Path, target: Path) -> bool:
    """A second name for a file, where the name is free; by a rename on file systems without hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            rename_new(source, target)
        except FileExistsError:
            return False
    return True


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A hidden file to write, which replaces `target` at the end of the block, or is removed after an exception."""
    with plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial = _partial(target)
        try:
            yield partial
            _sync(partial)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(target.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, nan_safe_json.dumps(value, indent=1) + "\n")


@contextmanager
def staged_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `target` at the end of the block, or removed after an exception."""
    if not overwrite and target.exists():
        raise _taken(target)
    with plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial = _partial(target)
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.rglob("*"), partial):  # after a power failure the target must not be incomplete
                _sync(path)
            _place(partial, target, overwrite=overwrite)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(target.parent)


def _place(partial: Path, target: Path, *, overwrite: bool) -> None:
    try:
        rename_new(partial, target)
    except FileExistsError:
        if not overwrite:
            raise _taken(target) from None
        swap_names(partial, target)  # the old content now has the hidden name
        _remove(partial)


def _taken(target: Path) -> Taken:
    return Taken(f"{target} exists already; choose another name or remove it first")


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or a path without write permission into a one-line error."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ArmillaryError(f"disk full while writing {path}; free some space or give --home DIR") from error
        if error.errno in _REFUSED and _concerns(error, path):
            raise ArmillaryError(f"cannot write {path} ({error.strerror}); choose a folder you may write to") from error
        raise


def _concerns(error: OSError, path: Path) -> bool:
    """Whether the error is about the written path, rather than a file that the caller reads."""
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    return place == path or place in path.parents or path.parent in place.parents


# --- hidden names: .NAME.partial-PID-BORN-RANDOM-HOST


def _partial(target: Path) -> Path:
    writer = Process.this()
    tag = f"{writer.pid}-{writer.born}-{secrets.token_hex(4)}-{writer.host}"
    return target.with_name(f".{target.name}.partial-{tag}")


def _sweep(target: Path) -> None:
    """Remove the leftovers of writers of this target that have ended."""
    prefix = f".{target.name}.partial-"
    for path in target.parent.iterdir():
        if path.name.startswith(prefix) and _is_stale(path.name.removeprefix(prefix)):
            _remove(path)


def sweep_folder(folder: Path) -> None:
    """Remove the leftovers of all writers in a folder that have ended."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        name, mark, tag = path.name.partition(".partial-")
        if mark and name.startswith(".") and _is_stale(tag):
            _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder atomically: it is renamed first, so that no reader finds half of it."""
    with plain_errors(path):
        hidden = _partial(path)
        os.rename(path, hidden)
        _remove(hidden)


def _is_stale(tag: str) -> bool:
    parts = tag.split("-", 3)
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return Process(pid=int(parts[0]), born=int(parts[1]), host=parts[3]).is_gone


def _remove(path: Path) -> None:
    """Best effort: another process may remove the same leftovers."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- two renames of Linux (renameat2) that POSIX and Python lack: without replacing a target, and swapping two names.
# Elsewhere they consist of plain renames: `rename_new` may then replace an empty folder, and `swap_names` has a moment
# in which the target is missing (and restores it when interrupted).


def rename_new(source: Path, target: Path) -> None:
    """Rename; FileExistsError where the target exists."""
    if _renameat2(source, target, _NOREPLACE):
        return
    try:
        if target.is_file():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise


def swap_names(first: Path, second: Path) -> None:
    """Swap two names atomically."""
    if not _renameat2(first, second, _EXCHANGE):
        _swap_by_renames(first, second)


def _swap_by_renames(first: Path, second: Path) -> None:
    old = first.with_name(first.name + "-old")
    os.rename(second, old)
    try:
        os.rename(first, second)
    except BaseException:
        os.rename(old, second)
        raise
    os.rename(old, first)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Whether it was done; False where the system or file system does not support it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


# --- syncing to disk


def _sync(path: Path) -> None:
    if not stat.S_ISREG(mode := os.lstat(path).st_mode) and not stat.S_ISDIR(mode):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
