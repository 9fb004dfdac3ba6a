"""Kernel tests: the interpreter is mended before any kernel runs, and numpy keeps quiet about infinities in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tests.kernels.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _infinities_are_meant() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield
