"""Errors of the disk while a checkpoint is written, as one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armillary.errors import ArmillaryError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """Raises one line for what the disk raises while files of a checkpoint are written into `folder`."""
    try:
        yield
    except OSError as error:
        raise write_error(folder, error.errno, error.strerror) from error
    except ArmillaryError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise write_error(folder, cause.errno, cause.strerror) from error


def write_error(folder: Path, number: int | None, text: str | None) -> ArmillaryError:
    if number in _FULL:
        return ArmillaryError(
            f"disk full while writing a checkpoint to {folder.parent}; free some space and train again: "
            "the run continues from the last complete one"
        )
    return ArmillaryError(f"cannot write a checkpoint to {folder.parent} ({text}); check the disk and train again")
