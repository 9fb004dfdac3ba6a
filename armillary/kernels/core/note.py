"""What a person should know of the kernels that run, said once: a fallback, a choice that is not kept."""

from __future__ import annotations

import logging
from functools import cache

LOG = logging.getLogger("armillary.kernels")


@cache
def note_once(text: str) -> None:
    """Say it on the log, once a process."""
    LOG.warning(text)
