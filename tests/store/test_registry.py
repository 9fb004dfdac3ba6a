"""Releases never change, aliases move in one step, and a changed file is noticed."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from armillary.errors import BadInput, BadModel, NotFound
from armillary.store import registry
from armillary.store.home import Home
from armillary.store.registry import list_releases, publish, resolve, set_alias, verify
from tests.store.victim import kill_at_random


@pytest.fixture
def two(home: Home, model_folder: Path) -> Home:
    """A registry with two versions of tiny."""
    publish(home, "tiny", model_folder)
    (model_folder / "model.safetensors").write_bytes(b"better weights")
    publish(home, "tiny", model_folder)
    return home


def test_publishing_copies_the_folder_and_says_what_it_is(home: Home, model_folder: Path) -> None:
    release = publish(home, "tiny", model_folder, run="2026-11-15-quiet-otter", note="first")
    assert (release.text, release.folder) == ("tiny:1", home.registry / "tiny" / "versions" / "1")
    assert (release.folder / "model.safetensors").read_bytes() == b"weights"
    manifest = release.manifest
    assert (manifest.run, manifest.note, manifest.config["hidden_size"]) == ("2026-11-15-quiet-otter", "first", 64)
    assert set(manifest.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert manifest.files["model.safetensors"].bytes == 7
    assert resolve(home, "tiny:1") == release
    verify(release)


def test_a_release_is_independent_of_its_source(two: Home) -> None:
    assert (resolve(two, "tiny:1").folder / "model.safetensors").read_bytes() == b"weights"
    assert (resolve(two, "tiny:2").folder / "model.safetensors").read_bytes() == b"better weights"


def test_links_as_in_the_hub_cache_become_files(home: Home, model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model.safetensors").rename(tmp_path / "blob")
    (model_folder / "model.safetensors").symlink_to(tmp_path / "blob")
    copy = publish(home, "tiny", model_folder).folder / "model.safetensors"
    assert not copy.is_symlink() and copy.read_bytes() == b"weights"


def test_files_of_a_release_are_read_only(two: Home) -> None:
    for path in resolve(two, "tiny:1").folder.iterdir():
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)


def test_progress_covers_every_byte(home: Home, model_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    release = publish(home, "tiny", model_folder, progress=lambda done, total: seen.append((done, total)))
    size = sum(entry.bytes for entry in release.manifest.files.values())
    assert seen == sorted(seen) and seen[-1] == (size, size)
    seen.clear()
    verify(release, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)


# --- tampering


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda f: _rewrite(f / "model.safetensors", b"wEights"), "model.safetensors was changed"),
        (lambda f: _rewrite(f / "model.safetensors", b"longer weights"), "model.safetensors was changed"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda f: (f / "extra.json").write_text("{}"), "extra.json was added"),
    ],
)
def test_any_change_is_noticed(home: Home, model_folder: Path, tamper: object, says: str) -> None:
    release = publish(home, "tiny", model_folder)
    assert callable(tamper)
    tamper(release.folder)
    with pytest.raises(BadModel, match=f"^tiny:1 is damaged: {says}; publish it again as a new version$"):
        verify(resolve(home, "tiny:1"))


def _rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


# --- finding


def test_a_name_alone_is_its_newest_version(two: Home) -> None:
    assert resolve(two, "tiny").version == 2
    assert resolve(two, "tiny@latest").version == 2


def test_listing(two: Home, model_folder: Path) -> None:
    publish(two, "other", model_folder)
    assert [release.text for release in list_releases(two)] == ["other:1", "tiny:2", "tiny:1"]
    assert [release.text for release in list_releases(two, "tiny")] == ["tiny:2", "tiny:1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tinny", r"^no release 'tinny'; did you mean tiny\?$"),
        ("tiny:7", r"^no version 7 of tiny; it has 1, 2$"),
        ("tiny:one", r"^no version one of tiny; it has 1, 2$"),
        ("tiny@producton", r"^no alias 'producton'; did you mean production\? \(of tiny\)$"),
        ("../tiny", r"^no release '../tiny'"),
    ],
)
def test_what_is_not_there(two: Home, text: str, says: str) -> None:
    set_alias(two, "tiny", "production", 1)
    with pytest.raises(NotFound, match=says):
        resolve(two, text)


def test_an_empty_registry_and_text_that_names_nothing(home: Home) -> None:
    with pytest.raises(NotFound, match=r"^no release 'tiny': \S+registry is empty; publish one first$"):
        resolve(home, "tiny")
    with pytest.raises(BadInput, match=r"write name, name:version or name@alias$"):
        resolve(home, "a:1@b")


def test_names_that_cannot_be_folders(home: Home, model_folder: Path) -> None:
    for name in ("", "../x", "a/b", "A", ".hidden", "x" * 200):
        with pytest.raises(BadInput, match=r"cannot be a release name; use small letters, digits, dots and dashes$"):
            publish(home, name, model_folder)


def test_publishing_nothing(home: Home, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        publish(home, "tiny", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no files"):
        publish(home, "tiny", tmp_path / "empty")
    assert not home.registry.exists()


# --- aliases


def test_an_alias_moves_and_remembers(two: Home) -> None:
    set_alias(two, "tiny", "production", 1)
    assert resolve(two, "tiny@production").version == 1
    set_alias(two, "tiny", "production", 2)
    set_alias(two, "tiny", "canary", 2)
    assert registry.aliases(two, "tiny") == {"production": 2, "canary": 2}
    moves = [(move["alias"], move["previous"], move["version"]) for move in registry.alias_history(two, "tiny")]
    assert moves == [("production", None, 1), ("production", 1, 2), ("canary", None, 2)]


def test_an_alias_needs_a_version_and_a_word(two: Home) -> None:
    with pytest.raises(NotFound, match="no version 9 of tiny"):
        set_alias(two, "tiny", "production", 9)
    for alias in ("latest", "7"):
        with pytest.raises(BadInput, match=r"choose a word like production$"):
            set_alias(two, "tiny", alias, 1)
    assert registry.aliases(two, "tiny") == {}


def test_readers_always_see_one_of_the_versions_while_an_alias_moves(two: Home) -> None:
    set_alias(two, "tiny", "production", 1)
    done = threading.Event()
    seen: set[int] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(resolve(two, "tiny@production").version)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for turn in range(40):
            set_alias(two, "tiny", "production", 1 + turn % 2)
        done.set()
        reader.result()
    assert seen <= {1, 2}
    assert len(registry.alias_history(two, "tiny")) == 41


def test_aliases_moved_at_once_are_all_kept(two: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: set_alias(two, "tiny", f"a{i}", 1), range(16)))
    assert len(registry.aliases(two, "tiny")) == 16


# --- at once, and killed


def test_publishing_at_once_gives_each_its_version(home: Home, model_folder: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda i: publish(home, "tiny", model_folder, note=str(i)), range(6)))
    assert sorted(release.version for release in made) == [1, 2, 3, 4, 5, 6]
    assert all(resolve(home, release.text).manifest.note == release.manifest.note for release in made)


def test_a_killed_publisher_leaves_only_whole_releases(home: Home, model_folder: Path) -> None:
    (model_folder / "model.safetensors").write_bytes(os.urandom(2_000_000))
    code = (
        "import sys; from pathlib import Path; from armillary.store.home import Home\n"
        "from armillary.store.registry import publish\n"
        "print('ready', flush=True)\n"
        "while True: publish(Home.at(sys.argv[1]), 'tiny', Path(sys.argv[2]))"
    )
    for _ in range(4):
        kill_at_random(code, home.work, model_folder)
    for release in list_releases(home):
        verify(release)
    publish(home, "tiny", model_folder)
    leftovers = [path for path in (home.registry / "tiny" / "versions").iterdir() if path.name.startswith(".")]
    assert leftovers == []
