"""Two renames of Linux (renameat2) that POSIX and Python lack: without replacing a target, and exchanging two names.

Elsewhere they consist of plain renames: `rename_new` may then replace an empty folder, and `exchange` has a moment
in which the target is missing (and restores it when interrupted).
"""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def rename_new(source: Path, target: Path) -> None:
    """Rename; FileExistsError where the target exists."""
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


def exchange(first: Path, second: Path) -> None:
    """Exchange two names atomically."""
    if not _renameat2(first, second, _EXCHANGE):
        _exchange_by_renames(first, second)


def _exchange_by_renames(first: Path, second: Path) -> None:
    aside = first.with_name(first.name + "-old")
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except BaseException:
        os.rename(aside, second)
        raise
    os.rename(aside, first)


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
