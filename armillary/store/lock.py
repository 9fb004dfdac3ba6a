"""Advisory locks between processes (flock): held by whoever has the file open, let go by the system when it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armillary.errors import BadInput
from armillary.store.atomic import plain_errors

# Some network file systems have no locks; there the rule "one writer a file" rests on the caller.
_POLL_S = 0.1
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def try_lock(descriptor: int) -> bool:
    """Take the lock on an open file without waiting; False when another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path` (made when missing) for the block, waiting for whoever has it."""
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(descriptor)
        yield
    finally:
        os.close(descriptor)


def wait_unlocked(path: Path, patience_s: float, said: str) -> None:
    """Until nobody holds the lock on `path`; BadInput with `said` where that takes too long."""
    if not path.is_file():
        return
    end = time.monotonic() + patience_s
    descriptor = os.open(path, os.O_RDWR)
    try:
        while not try_lock(descriptor):
            if time.monotonic() > end:
                raise BadInput(said)
            time.sleep(_POLL_S)
    finally:
        os.close(descriptor)


def _wait(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
