"""Fixtures that every test may use: a home of its own, the command line in process, a pool of gloo ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.gpu_present import gpu_present

# Images often forbid byte code: then pytest would rewrite every test file in every run, and every child process would
# compile the whole package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Small tensors gain nothing from threads, and threads that spin on a busy machine make tests many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU, Triton kernels are interpreted; triton looks at this when it is first imported.
if not gpu_present():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from armillary.store.home import Home
from tests.fork_server import ForkServer, shared
from tests.ranks import Ranks
from tests.user_home import use_own_home

use_own_home()

# A busy machine is no failure.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

sys.dont_write_bytecode = False  # this process has read the variable already


@dataclass(frozen=True)
class Ran:
    """What a run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that --json promises."""
        return json.loads(self.out)


LONG = (
    "training/test_verb.py",
    "training/setup/test_kernel_selection.py",
    "test_recipes_and_examples.py",
    "model/test_agreement.py",
    "training/step/test_router_balance.py",
    "training/checkpoint/test_checkpoint.py",
)
"""files that take long by themselves"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two workers (`make test`) share the tests out by file, so that fixtures are made once; all tests on ranks are one
    worker's, with one pool, and come first, because they are the longest that cannot be shared out. Long files come
    next: at the end of the run one worker would wait for the other's."""
    items.sort(key=lambda item: (not _on_ranks(item), not _file(item).endswith(LONG)))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group("ranks" if _on_ranks(item) else _file(item)))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _on_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "home")


@pytest.fixture
def cli(home: Home, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`cli("models", "gpt2", "--json")` runs that line in this process, with `home` as its --home."""
    from armillary.cli.main import main

    def run(*args: str) -> Ran:
        capfd.readouterr()
        code = main([*args, "--home", str(home.work)] if _takes_home(args) else args)
        captured = capfd.readouterr()
        return Ran(code=code, out=captured.out, err=captured.err)

    return run


def _takes_home(args: tuple[str, ...]) -> bool:
    return bool(args) and not args[0].startswith("-") and "--home" not in args and "--help" not in args


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One pool of gloo ranks for the whole test run: `ranks.run(2, function, *args)` gives a result a rank."""
    with Ranks(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """Starts command lines in processes of their own without the seconds that imports take."""
    return shared()
