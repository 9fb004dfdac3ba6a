"""Nothing of a pretended GPU outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from armillary.machine.accelerator import accelerator_of


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    accelerator_of.cache_clear()
