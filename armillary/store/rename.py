"""Two renames that POSIX lacks and Linux has (renameat2): never over an existing target, and two names exchanged.

Elsewhere they are made of plain renames: `rename_new` may then replace an empty folder, and `exchange` has a moment
in which the target is missing (and puts it back when interrupted).
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def rename_new(source: Path, target: Path) -> None:
    """Rename, raising FileExistsError where the target is already there."""
    if _renameat2(source, target, _NOREPLACE):
        return
    try:
        if target.is_file():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step."""
    if not _renameat2(one, other, _EXCHANGE):
        _exchange_slowly(one, other)


def _exchange_slowly(one: Path, other: Path) -> None:
    aside = one.with_name(one.name + "-old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """True when done, False where the system or file system has no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
