"""Python's garbage collector while an engine serves: it looks through what requests leave, not through all there is.

A full collection with a model and its libraries loaded takes a hundred milliseconds, which is ten steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now is left out of collections until the end."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
