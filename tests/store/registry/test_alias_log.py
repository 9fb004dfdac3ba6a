"""Aliases move in one step, every move is on record, and none of many writers' moves is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from armillary.errors import BadInput, NotFound
from armillary.store.home import Home
from armillary.store.registry.object_store import FsspecStore, LocalStore
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.registry import Registry

WRITERS = 50


@pytest.fixture(params=["folder", "memory"])
def three(request: pytest.FixtureRequest, home: Home, model_folder: Path, tmp_path: Path) -> Registry:
    """Three versions of tiny, in a folder and in a store of fsspec."""
    registry = open_registry(home, "" if request.param == "folder" else f"memory://{tmp_path.name}")
    for content in (b"1", b"2", b"3"):
        (model_folder / "model.safetensors").write_bytes(content)
        registry.push("tiny", model_folder)
    return registry


def test_an_alias_moves_and_remembers(three: Registry) -> None:
    for text, alias in (
        ("tiny:1", "champion"),
        ("tiny:2", "champion"),
        ("tiny@latest", "canary"),
        ("tiny:3", "canary"),
    ):
        three.promote(text, alias)
    assert three.aliases("tiny") == {"champion": 2, "canary": 3}
    moves = [(move.kind, move.alias, move.previous, move.version) for move in three.history("tiny")]
    assert moves == [
        ("promote", "champion", None, 1),
        ("promote", "champion", 1, 2),
        ("promote", "canary", None, 3),
    ], "a promotion to the same version is no move"


def test_rollback_goes_back_one_promotion_at_a_time(three: Registry) -> None:
    for version in (1, 2, 3):
        three.promote(f"tiny:{version}", "champion")
    assert [three.rollback("tiny", "champion").version for _ in range(2)] == [2, 1]
    with pytest.raises(BadInput, match="no earlier version to go back to; promote another one instead"):
        three.rollback("tiny", "champion")
    three.promote("tiny:3", "champion")
    assert three.rollback("tiny", "champion").version == 1
    with pytest.raises(BadInput, match="alias canary is not set"):
        three.rollback("tiny", "canary")


def test_a_promotion_may_depend_on_where_the_alias_is(three: Registry) -> None:
    three.promote("tiny:1", "champion", expect=0)
    with pytest.raises(
        BadInput, match="alias champion is at version 1, not at version 2; look at it and promote again"
    ):
        three.promote("tiny:3", "champion", expect=2)
    assert three.promote("tiny:2", "champion", expect=1).version == 2


def test_an_alias_needs_a_version_and_a_word(three: Registry) -> None:
    with pytest.raises(NotFound, match="no version 9 of tiny"):
        three.promote("tiny:9", "champion")
    for alias in ("latest", "7", "sha256"):
        with pytest.raises(BadInput, match=r"choose a word like champion$"):
            three.promote("tiny:1", alias)
    for alias in ("../x", "a/b", ""):
        with pytest.raises(BadInput, match="cannot name an alias"):
            three.promote("tiny:1", alias)
    assert three.aliases("tiny") == {}


def test_fifty_writers_lose_no_move(home: Home, model_folder: Path, tmp_path: Path) -> None:
    """Threads that each move an alias of their own and one that all share, in a store that fails all but the first."""
    three = open_registry(home, f"memory://{tmp_path.name}")
    for note in ("1", "2", "3"):
        three.push("tiny", model_folder, note=note)

    def move(writer: int) -> None:
        three.promote(f"tiny:{1 + writer % 3}", f"a{writer}")
        three.promote(f"tiny:{1 + writer % 2}", "shared")

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(move, range(WRITERS)))
    table = three.aliases("tiny")
    assert {alias: table[alias] for alias in table if alias != "shared"} == {f"a{i}": 1 + i % 3 for i in range(WRITERS)}
    shared = [move for move in three.history("tiny") if move.alias == "shared"]
    for earlier, later in pairwise(shared):
        assert later.previous == earlier.version, "each move was decided by the one before it"


def test_a_folder_without_locks_loses_no_move(home: Home, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems where they do nothing: files are created exclusively, whoever holds a lock."""
    monkeypatch.setattr(LocalStore, "queue", lambda store, folder: nullcontext())
    registry = open_registry(home)
    registry.push("tiny", model_folder)
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda writer: registry.promote("tiny:1", f"a{writer}"), range(WRITERS)))
    assert registry.aliases("tiny") == {f"a{writer}": 1 for writer in range(WRITERS)}


def test_fifty_processes_lose_no_move(home: Home, model_folder: Path) -> None:
    registry = open_registry(home)
    registry.push("tiny", model_folder)
    code = (
        "import os, sys; from armillary.store.home import Home\n"
        "from armillary.store.registry.open_registry import open_registry\n"
        "registry = open_registry(Home.at(sys.argv[1]))\n"
        "children = []\n"
        f"for writer in range({WRITERS}):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        try:\n"
        "            registry.promote('tiny:1', f'a{writer}'); os._exit(0)\n"
        "        finally:\n"
        "            os._exit(1)\n"
        "    children.append(pid)\n"
        "sys.exit(any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(home.work)], check=True, env={**os.environ, "PYTHONPATH": _root()})
    assert registry.aliases("tiny") == {f"a{writer}": 1 for writer in range(WRITERS)}
    assert [move.number for move in registry.history("tiny")] == list(range(1, WRITERS + 1))


def _root() -> str:
    return str(Path(__file__).parents[3])


def test_readers_always_see_a_version_while_an_alias_moves(three: Registry) -> None:
    three.promote("tiny:1", "champion")
    done = threading.Event()
    seen: set[int] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(three.resolve("tiny@champion").version)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for count in range(20):
            three.promote(f"tiny:{1 + count % 2}", "champion")
        done.set()
        reader.result()
    assert seen <= {1, 2}


def test_a_store_that_cannot_create_exclusively_is_refused(tmp_path: Path) -> None:
    store = FsspecStore(f"memory://{tmp_path.name}")
    store.scheme = "ftp"
    with pytest.raises(
        BadInput, match=r"^ftp:// cannot create a file exclusively, which a registry needs; use file://"
    ):
        store.create("tiny/versions/00000001.json", b"{}")
