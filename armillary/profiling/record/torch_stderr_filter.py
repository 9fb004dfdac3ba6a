"""The line torch prints on stderr when memory is freed that was allocated before a recording began.

It comes with the first such block, then with every thousandth: so a block of ours is the first, and its line is left
out. Whatever else is written to stderr in that moment is passed on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LINE = b"Memory block of unknown size was allocated before"


@contextmanager
def freed_unknown_block() -> Iterator[None]:
    """Around the start of a recording."""
    block = [torch.empty(1)]
    yield
    try:
        stderr = os.dup(2)
    except OSError:  # there is none
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            block.clear()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        others = b"".join(line for line in file if _LINE not in line)
    if others:
        os.write(2, others)
