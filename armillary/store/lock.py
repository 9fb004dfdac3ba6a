"""Advisory locks between processes (flock): held while a file is open, released by the system when its process dies.

Not the filelock package, because the gauges file itself is locked: filelock opens, truncates and closes a file of its
own, and cannot lock a descriptor that is already open.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armillary.errors import BadInput
from armillary.store.atomic import plain_errors

# Some network file systems have no locks; there the caller is responsible for one writer per file.
_POLL_S = 0.1
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def try_lock(descriptor: int) -> bool:
    """Take the lock on an open file without waiting; False where another process holds it."""
    try:
        _lock(descriptor, fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, flags: int = 0) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path`, which is created where missing, during the block; wait for it first."""
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def wait_unlocked(path: Path, timeout_s: float, message: str) -> None:
    """Wait until no process holds the lock on `path`; BadInput with `message` after `timeout_s`."""
    if not path.is_file():
        return
    end = time.monotonic() + timeout_s
    descriptor = os.open(path, os.O_RDWR)
    try:
        while not try_lock(descriptor):
            if time.monotonic() > end:
                raise BadInput(message)
            time.sleep(_POLL_S)
    finally:
        os.close(descriptor)
