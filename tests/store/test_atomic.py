"""Files and folders appear whole or not at all, whatever happens to the writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError
from armillary.store import atomic
from armillary.store.atomic import Taken, staged_folder, write_bytes, write_json, write_text
from armillary.store.writer_process import Process
from tests.store.victim import kill_at_random


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- files


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert names(path.parent) == ["state.json"]


def test_text_and_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "grün\n")
    write_bytes(tmp_path / "b", b"\0\1")
    assert (tmp_path / "a").read_text() == "grün\n"
    assert (tmp_path / "b").read_bytes() == b"\0\1"


def test_files_are_as_readable_as_others(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_text(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}
    assert names(tmp_path) == ["state.json"]


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    monkeypatch.setattr(os, "fsync", _failing(errno.ENOSPC))
    with pytest.raises(ArmillaryError, match=r"^disk full while writing .*state\.json; free some space"):
        write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert names(tmp_path) == ["state.json"]


def test_a_file_where_a_folder_should_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ArmillaryError, match=r"^cannot write .*; choose a folder you may write to$"):
        write_text(tmp_path / "runs" / "a" / "b", "x")


def _failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# --- folders


def test_a_staged_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "120"
    with staged_folder(target) as partial:
        assert partial.parent == target.parent
        assert partial.name.startswith(".120.partial-")
        (partial / "sub").mkdir()
        (partial / "sub" / "weights").write_text("w")
        assert not target.exists()
    assert (target / "sub" / "weights").read_text() == "w"
    assert names(target.parent) == ["120"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged_folder(tmp_path / "x") as partial:
        (partial / "half").write_text("h")
        raise error
    assert names(tmp_path) == []


def test_an_existing_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with (
        pytest.raises(Taken, match=r"x exists already; choose another name or remove it first$"),
        staged_folder(tmp_path / "x"),
    ):
        raise AssertionError("not reached")


def test_a_folder_made_by_another_in_the_meantime_is_kept(tmp_path: Path) -> None:
    with pytest.raises(Taken), staged_folder(tmp_path / "x") as partial:
        (partial / "mine").write_text("m")
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "theirs").write_text("t")
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["theirs"]


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's own exchange of names, and as on a system without one."""
    if request.param == "elsewhere":
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)


@pytest.mark.usefixtures("system")
def test_overwriting_swaps_old_for_new(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with staged_folder(tmp_path / "x", overwrite=True) as partial:
            (partial / text).write_text(text)
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["new"]


@pytest.mark.usefixtures("system")
def test_refusing_and_overwriting_are_told_apart(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "x") as partial:
        (partial / "first").write_text("")
    with pytest.raises(Taken), staged_folder(tmp_path / "x"):
        pass
    assert names(tmp_path / "x") == ["first"]


@pytest.mark.usefixtures("system")
def test_a_rename_never_covers_what_is_there(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    with pytest.raises(FileExistsError):
        atomic.rename_new(tmp_path / "one", tmp_path / "other")
    assert names(tmp_path / "other") == ["other"]


def test_an_overwrite_that_fails_keeps_the_old_folder(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "x") as partial:
        (partial / "old").write_text("")
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "x", overwrite=True):
        raise RuntimeError
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["old"]


def test_a_disk_that_fills_up_in_the_block(tmp_path: Path) -> None:
    with pytest.raises(ArmillaryError, match="disk full while writing"), staged_folder(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_errors_about_what_the_block_reads_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), staged_folder(tmp_path / "out" / "x"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/secret")


# --- leftovers


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_kept(tmp_path: Path) -> None:
    me = Process.this()
    dead = f".x.partial-{2**22 + 1}-5-aaaa-{me.host}"
    reused = f".x.partial-{me.pid}-{me.born + 1}-bbbb-{me.host}"
    mine = f".x.partial-{me.pid}-{me.born}-cccc-{me.host}"
    elsewhere = f".x.partial-{2**22 + 1}-5-dddd-other-host"
    foreign = ".x.partial-notes"
    for name in (dead, reused, mine, elsewhere, foreign, ".y" + dead[2:]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("")
    with staged_folder(tmp_path / "x"):
        pass
    assert set(names(tmp_path)) == {"x", mine, elsewhere, foreign, ".y" + dead[2:]}


def test_leftover_files_too(tmp_path: Path) -> None:
    (tmp_path / f".f.partial-{2**22 + 1}-5-aaaa-{Process.this().host}").write_text("torn")
    write_text(tmp_path / "f", "x")
    assert names(tmp_path) == ["f"]


# --- killed


NEW_FOLDERS = """
import sys
from pathlib import Path
from armillary.store.atomic import staged_folder
for i in range(100000):
    with staged_folder(Path(sys.argv[1]) / str(i)) as partial:
        for name in "abc":
            (partial / name).write_text(str(i) * 1000)
    if i == 0: print("ready", flush=True)
"""

SAME_FOLDER = NEW_FOLDERS.replace("/ str(i)) as", '/ "x", overwrite=True) as')


def test_a_killed_writer_leaves_only_whole_folders(tmp_path: Path) -> None:
    for round_ in range(4):
        folder = tmp_path / str(round_)
        kill_at_random(NEW_FOLDERS, folder)
        for path in folder.iterdir():
            assert path.name.startswith(f".{path.name[1:].partition('.')[0]}.partial-") or _is_whole(path)
        half_done = str(len([name for name in names(folder) if not name.startswith(".")]))
        with staged_folder(folder / half_done):
            pass
        assert not any(name.startswith(".") for name in names(folder))


def test_a_killed_overwrite_leaves_the_old_folder_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for _ in range(4):
        kill_at_random(SAME_FOLDER, tmp_path)
        assert _is_whole(target)
    with staged_folder(target, overwrite=True):
        pass
    assert names(tmp_path) == ["x"]


def _is_whole(folder: Path) -> bool:
    texts = [(folder / name).read_text() for name in "abc"]
    return names(folder) == ["a", "b", "c"] and len(set(texts)) == 1 and len(texts[0]) >= 1000


def test_the_slow_exchange_puts_the_old_back_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError):
        atomic._swap_by_renames(tmp_path / "missing", tmp_path / "old")
    assert names(tmp_path) == ["old"]


def test_contents_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic, "_sync", lambda path: synced.append(path.name))
    with staged_folder(tmp_path / "x") as partial:
        (partial / "w").write_text("")
        shutil.copy(partial / "w", partial / "v")
    assert set(synced[:2]) == {"v", "w"}
    assert synced[-1] == tmp_path.name
