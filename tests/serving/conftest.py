"""One server process of a tiny model for all tests that do not break it, and a way to start others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.tiny import Server, make_folder, run_server


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """Shared: leave it as it was found."""
    with run_server(folder, "--set", "serve.kv_bytes=20MB") as found:
        yield found
