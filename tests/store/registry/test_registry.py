"""Releases never change, their files are stored once, and nothing that was changed is loaded."""

from __future__ import annotations

import json
import os
import pickle
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from armillary.errors import BadInput, BadModel, NotFound
from armillary.store.home import Home
from armillary.store.registry.garbage import collect
from armillary.store.registry.object_store import _is_refusal
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.registry import Registry, blob_path
from armillary.store.registry.writer_marks import writing
from armillary.store.resolve_model import resolve_model
from tests.store.victim import kill_at_random


@pytest.fixture
def registry(home: Home) -> Registry:
    return open_registry(home)


@pytest.fixture
def two(registry: Registry, model_folder: Path) -> Registry:
    """A registry with two versions of tiny."""
    registry.push("tiny", model_folder)
    (model_folder / "model.safetensors").write_bytes(b"better weights")
    registry.push("tiny", model_folder)
    return registry


def blobs(registry: Registry) -> list[Path]:
    return sorted(path for path in Path(registry.store.url, "blobs").rglob("*") if path.is_file())


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


# --- pushing


def test_a_manifest_says_what_the_release_is(registry: Registry, model_folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(64)
    (model_folder / "model.safetensors").write_bytes(weights)
    (model_folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    config = json.loads((model_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "modules": ["a"]}
    (model_folder / "config.json").write_text(json.dumps(config))
    release = registry.push("tiny", model_folder, run="2026-11-15-quiet-otter", note="first", evals={"mmlu": 0.5})
    manifest = release.manifest
    assert (release.text, manifest.run, manifest.note, manifest.evals) == (
        "tiny:1",
        "2026-11-15-quiet-otter",
        "first",
        {"mmlu": 0.5},
    )
    assert (manifest.config["hidden_size"], manifest.licence) == (64, "apache-2.0")
    assert manifest.quantization == {"quant_method": "fp8"} and len(manifest.tokenizer) == 64
    assert (manifest.weights.parameters, manifest.weights.dtypes) == (32, ("BF16",))
    assert (manifest.weights.format, manifest.weights.bytes) == ("safetensors", len(weights))
    assert registry.resolve("tiny:1") == release


def test_the_same_content_is_the_same_version_and_equal_files_are_stored_once(
    two: Registry, model_folder: Path
) -> None:
    assert two.push("tiny", model_folder).text == "tiny:2"
    assert two.push("tiny", model_folder, note="as evaluated").text == "tiny:3"
    assert len(blobs(two)) == 4, "config, tokenizer, two weights"


def test_links_as_in_the_hub_cache_become_files(registry: Registry, model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model.safetensors").rename(tmp_path / "blob")
    (model_folder / "model.safetensors").symlink_to(tmp_path / "blob")
    copy = registry.load(registry.push("tiny", model_folder)) / "model.safetensors"
    assert not copy.is_symlink() and copy.read_bytes() == b"weights"


def test_a_loaded_release_is_read_only_and_independent_of_its_source(two: Registry) -> None:
    first, second = (two.load(two.resolve(f"tiny:{version}")) for version in (1, 2))
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert (second / "model.safetensors").read_bytes() == b"better weights"
    for path in first.iterdir():
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)


def test_progress_covers_every_byte(registry: Registry, model_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    release = registry.push("tiny", model_folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (2 * release.manifest.bytes, 2 * release.manifest.bytes)
    seen.clear()
    registry.pull(release, tmp_path / "copy", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (2 * release.manifest.bytes, 2 * release.manifest.bytes)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", ".hidden", "x" * 200, "blobs", "a\n", "..", "a\\b"])
def test_names_that_cannot_be_folders(registry: Registry, model_folder: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"cannot name a release; use small letters, digits, dots and dashes$"):
        registry.push(name, model_folder)
    with pytest.raises(BadInput, match="is not a release"):
        registry.resolve(f"{name}@champion")
    assert registry.versions(name) == []


def test_pickles_are_refused_by_name_and_by_content(registry: Registry, model_folder: Path) -> None:
    code = pickle.dumps({"weights": 1})
    for name in ("pytorch_model.bin", "optimizer.pt", "notes.txt"):
        (model_folder / name).write_bytes(code)
        with pytest.raises(BadModel, match=f"{name} is pickled, and loading it can run code"):
            registry.push("tiny", model_folder)
        (model_folder / name).unlink()
    assert registry.names() == []


def test_publishing_nothing(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        registry.push("tiny", tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no files"):
        registry.push("tiny", tmp_path / "empty")
    assert not Path(registry.store.url).exists()


# --- tampering


@pytest.mark.parametrize("loaded", [False, True])
def test_a_changed_blob_is_never_loaded(two: Registry, loaded: bool, tmp_path: Path) -> None:
    release = two.resolve("tiny:1")
    if loaded:
        two.load(release)
    digest = release.manifest.files["model.safetensors"].sha256
    rewrite(Path(two.store.url, blob_path(digest)), b"wEights")
    for attempt in (two.load, two.verify, lambda release: two.pull(release, tmp_path / "copy")):
        with pytest.raises(BadModel, match=r"^tiny:1 is damaged in \S+: model.safetensors was changed; delete"):
            attempt(release)
    assert not (tmp_path / "copy").exists()


def test_a_damaged_local_copy_is_replaced(two: Registry) -> None:
    release = two.resolve("tiny:1")
    folder = two.load(release)
    (folder / "tokenizer.json").unlink()
    (folder / "extra.py").write_text("import os")
    assert sorted(path.name for path in two.load(release).iterdir()) == sorted(release.manifest.files)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"hidden_size": 64', '"hidden_size": 65', "was changed after it was written"),
        ('"tokenizer.json"', '"../../escape"', "names a bad file"),
        ('"tokenizer.json"', '"/etc/passwd"', "names a bad file"),
        ('"format": 1', '"format": 2', "newer version of armillary"),
        ('"name"', '"nam"', "is damaged"),
    ],
)
def test_a_changed_manifest_is_never_loaded(two: Registry, old: str, new: str, says: str) -> None:
    path = Path(two.store.url, "tiny/versions/00000001.json")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadModel, match=says):
        two.resolve("tiny:1")


def test_a_manifest_swapped_under_an_alias_or_a_name_is_noticed(two: Registry, model_folder: Path) -> None:
    two.promote("tiny:1", "champion")
    folder = Path(two.store.url, "tiny/versions")
    (folder / "00000001.json").unlink()
    os.link(folder / "00000002.json", folder / "00000001.json")
    with pytest.raises(BadModel, match="tiny:1 is not what was promoted to champion"):
        two.resolve("tiny@champion")
    two.push("other", model_folder)
    (folder / "00000001.json").unlink()
    os.link(Path(two.store.url, "other/versions/00000001.json"), folder / "00000001.json")
    with pytest.raises(BadModel, match="tiny:1 is a release of other"):
        two.resolve("tiny:1")


# --- finding


def test_references(two: Registry, model_folder: Path) -> None:
    two.promote("tiny:1", "champion")
    assert two.resolve("tiny").version == two.resolve("tiny@latest").version == 2
    assert two.resolve("tiny@champion").version == 1
    assert two.resolve(f"tiny@sha256:{two.resolve('tiny:1').digest[:12]}").version == 1
    two.push("other", model_folder)
    assert [release.text for release in two.releases()] == ["other:1", "tiny:2", "tiny:1"]
    assert [release.text for release in two.releases("tiny")] == ["tiny:2", "tiny:1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tinny", r"^no release 'tinny'; did you mean tiny\?$"),
        ("tiny:7", r"^no version 7 of tiny; it has 1, 2$"),
        ("tiny@champon", r"^no alias 'champon'; did you mean champion\? \(of tiny\)$"),
        ("tiny@sha256:00000000", r"^no version of tiny has the digest 00000000; "),
    ],
)
def test_what_is_not_there(two: Registry, text: str, says: str) -> None:
    two.promote("tiny:1", "champion")
    with pytest.raises(NotFound, match=says):
        two.resolve(text)


def test_a_model_argument_names_a_release(two: Registry, home: Home) -> None:
    two.promote("tiny:1", "champion")
    for text, name in (("registry:tiny@champion", "tiny:1"), ("registry:tiny", "tiny:2"), ("tiny@champion", "tiny:1")):
        source = resolve_model(text, home, need_weights=True)
        assert (source.name, source.origin) == (name, "release")
    elsewhere = Home.at(home.work.parent / "elsewhere")
    assert resolve_model(f"registry:{home.registry}/tiny:1", elsewhere, need_weights=True).name == "tiny:1"


# --- garbage


def test_collection_keeps_what_aliases_need(two: Registry, model_folder: Path) -> None:
    for content in (b"third", b"fourth", b"fifth"):
        (model_folder / "model.safetensors").write_bytes(content)
        two.push("tiny", model_folder)
    two.promote("tiny:2", "champion")
    two.promote("tiny:3", "champion")
    assert collect(two).blobs == 0, "every blob has a version"
    planned = collect(two, keep=1, dry_run=True)
    assert (planned.versions, planned.blobs, two.versions("tiny")) == (("tiny:1", "tiny:4"), 2, [1, 2, 3, 4, 5])
    assert collect(two, keep=1) == planned
    assert two.versions("tiny") == [2, 3, 5]
    for release in two.releases():
        two.verify(release)
    assert two.rollback("tiny", "champion").version == 2
    assert two.push("tiny", model_folder, note="next").version == 6, "numbers are not used twice"


def test_collection_spares_what_a_push_is_about_to_refer_to(two: Registry) -> None:
    release = two.resolve("tiny:1")
    path = Path(two.store.url, "tiny/versions/00000001.json")
    path.unlink()
    digest = release.manifest.files["model.safetensors"].sha256
    with writing(two.store, blobs=[digest]):
        assert collect(two).blobs == 0
    assert collect(two).blobs == 1


# --- at once, and killed


def test_pushing_at_once_gives_each_its_version(registry: Registry, model_folder: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda i: registry.push("tiny", model_folder, note=str(i)), range(6)))
    assert sorted(release.version for release in made) == [1, 2, 3, 4, 5, 6]
    assert all(registry.resolve(release.text).manifest.note == release.manifest.note for release in made)


def test_a_killed_push_leaves_only_complete_releases(home: Home, registry: Registry, model_folder: Path) -> None:
    (model_folder / "model.safetensors").write_bytes(os.urandom(2_000_000))
    code = (
        "import sys, time; from pathlib import Path; from armillary.store.home import Home\n"
        "from armillary.store.registry.open_registry import open_registry\n"
        "print('ready', flush=True)\n"
        "while True: open_registry(Home.at(sys.argv[1])).push('tiny', Path(sys.argv[2]), note=str(time.time()))"
    )
    for _ in range(3):
        kill_at_random(code, home.work, model_folder)
    registry.push("tiny", model_folder)
    collect(registry)
    for release in registry.releases():
        registry.verify(release)
    assert [path for path in Path(registry.store.url).rglob(".*") if path.name != ".lock"] == []


def test_only_the_stores_own_refusal_means_that_an_object_exists() -> None:
    class ClientError(Exception):  # as botocore's
        def __init__(self, code: str) -> None:
            super().__init__(f"An error occurred ({code}) for key v412")
            self.response = {"Error": {"Code": code}}

    assert _is_refusal(ClientError("PreconditionFailed")) and _is_refusal(ClientError("ConditionalRequestConflict"))
    assert not _is_refusal(ClientError("SlowDown")), "412 in a path is no answer"
