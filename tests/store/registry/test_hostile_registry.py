"""Registries into which somebody has written what was meant to harm: refused in one line, and nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import ArmillaryError, BadModel
from armillary.spec.toml.fields import build
from armillary.store.home import Home
from armillary.store.registry.garbage import collect
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.registry import Registry, blob_path
from armillary.store.registry.release import ReleaseManifest, digest_of


@pytest.fixture
def registry(home: Home, model_folder: Path) -> Registry:
    """With one version of bot."""
    made = open_registry(home)
    made.push("bot", model_folder)
    return made


def outside(registry: Registry, folder: Path) -> set[Path]:
    """Files that are not in the local copies of releases."""
    return {path for path in folder.rglob("*") if registry.cache not in path.parents and path != registry.cache}


MALICIOUS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file above its folder": lambda table: table["files"].update({"../../x": table["files"]["config.json"]}),
    "an absolute file": lambda table: table["files"].update({"/tmp/x": table["files"]["config.json"]}),
    "a hidden file": lambda table: table["files"].update({".ssh/x": table["files"]["config.json"]}),
    "a file inside a file": lambda table: table["files"].update({"config.json/x": table["files"]["config.json"]}),
    "a blob elsewhere": lambda table: table["files"]["config.json"].update(sha256="../../../etc/passwd"),
    "another blob": lambda table: table["files"]["config.json"].update(sha256="0" * 64),
    "a size": lambda table: table["files"]["config.json"].update(bytes=-1),
    "another name": lambda table: table.update(name="../other"),
    "a list": lambda table: table.update(files=[1]),
}


@pytest.mark.parametrize("what", MALICIOUS)
def test_a_manifest_made_to_harm_is_refused(registry: Registry, tmp_path: Path, what: str) -> None:
    """Written by somebody who can write to the store, and so with a digest that fits."""
    path = Path(registry.store.url, "bot", "versions", "00000001.json")
    table = json.loads(path.read_text())
    MALICIOUS[what](table)
    with suppress(ArmillaryError):
        table["digest"] = digest_of(build(ReleaseManifest, {k: v for k, v in table.items() if k != "digest"}, "x"))
    path.chmod(0o644)
    path.write_text(json.dumps(table))
    before = outside(registry, tmp_path)
    with pytest.raises(ArmillaryError) as refused:
        registry.load(registry.resolve("bot:1"))
    assert outside(registry, tmp_path) == before
    if what in ("a file above its folder", "an absolute file", "a blob elsewhere"):
        assert "names a bad file" in str(refused.value), "nothing at that place was looked at"


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"[" * 100_000, b'{"number": 7}', b"\xff\xfe", b'{"number": 0}'])
def test_a_damaged_alias_log_is_one_line_and_stops_nobody_for_long(registry: Registry, data: bytes) -> None:
    registry.promote("bot:1", "champion")
    path = Path(registry.store.url, "bot", "aliases", "00000001.json")
    path.chmod(0o644)
    path.write_bytes(data)
    for act in (partial(registry.resolve, "bot@champion"), partial(registry.promote, "bot:1", "canary")):
        with pytest.raises(ArmillaryError, match=r"is damaged|alias"):
            act()
    assert registry.resolve("bot:1").version == 1, "versions are still there"


def test_files_that_are_no_part_of_a_registry_are_passed_over(registry: Registry) -> None:
    for folder in ("bot/versions", "bot/aliases"):
        Path(registry.store.url, folder).mkdir(exist_ok=True)
        for name in ("²³.json", "1.json", "999999999.json", "notes.txt"):
            Path(registry.store.url, folder, name).write_text("x")
    marks = Path(registry.store.url, "marks")
    marks.mkdir(exist_ok=True)
    for number, mark in enumerate(("{", "[]", '{"time": "x"}', '{"time": 1e300, "blobs": 5}')):
        (marks / f"write-{number}.json").write_text(mark)
    (marks / "collect.json").write_text('{"until": 1e11}')  # for ever: no collection may take so long
    registry.promote("bot:1", "champion")
    assert registry.versions("bot") == [1] and registry.aliases("bot") == {"champion": 1}
    assert collect(registry, dry_run=True).blobs == 0


def test_a_link_in_place_of_a_blob_is_not_followed(registry: Registry, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    entry = registry.resolve("bot:1").manifest.files["config.json"]
    blob = Path(registry.store.url, blob_path(entry.sha256))
    secret.write_bytes(blob.read_bytes())  # even where the content fits, it could change after the check
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(BadModel, match=r"config\.json was changed"):
        registry.load(registry.resolve("bot:1"))
