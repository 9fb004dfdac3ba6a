"""The registry: releases that never change, and aliases that move between them.

    registry/NAME/versions/V/     files of version V (1, 2, …) and manifest.json with their checksums
    registry/NAME/aliases.json    alias -> version now, and every move before

A version is published atomically by a rename; an alias moves by replacing one small file.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, BadModel, NotFound, unknown
from armillary.spec.toml.fields import build, to_plain
from armillary.store import manifest as manifests
from armillary.store import nan_safe_json
from armillary.store.atomic import staged_folder, write_json
from armillary.store.home import Home
from armillary.store.lock import locked
from armillary.store.manifest import Manifest
from armillary.store.progress import Progress, silent

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_REFERENCE = re.compile(r"(?P<name>[^:@]+)(?::(?P<version>[^:@]+)|@(?P<alias>[^:@]+))?")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One published version: a Hugging Face folder with its manifest."""

    name: str
    version: int
    folder: Path
    manifest: Manifest

    @property
    def text(self) -> str:
        return f"{self.name}:{self.version}"


def publish(
    home: Home, name: str, folder: Path, *, run: str = "", note: str = "", progress: Progress = silent
) -> Release:
    """Copy a folder into the registry as the next version of `name`."""
    _check_name("release", name)
    manifests.check_source(folder)
    place = home.registry / name
    with locked(place / ".publish.lock"):
        version = max(versions(home, name), default=0) + 1
        target = place / "versions" / str(version)
        with staged_folder(target) as partial:
            files = manifests.copy_files(folder, partial, progress)
            manifest = Manifest(created=time.time(), run=run, note=note, config=manifests.summary(folder), files=files)
            write_json(partial / manifests.NAME, to_plain(manifest))
            (partial / manifests.NAME).chmod(0o444)
    return Release(name=name, version=version, folder=target, manifest=manifest)


def resolve(home: Home, text: str) -> Release:
    """The release that `name` (its newest), `name:version` or `name@alias` stands for."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise BadInput(f"'{text}' is not a release; write name, name:version or name@alias")
    name, version, alias = match["name"], match["version"], match["alias"]
    known = versions(home, name)
    if not known:
        raise _no_release(home, name)
    if alias is not None:
        version = str(_version_of(home, name, alias))
    if version is not None and version not in map(str, known):
        raise NotFound(f"no version {version} of {name}; it has {', '.join(map(str, known))}")
    return _load(home, name, int(version) if version else known[-1])


def versions(home: Home, name: str) -> list[int]:
    """Published versions, in order."""
    place = home.registry / name / "versions"
    if not _NAME.fullmatch(name) or not place.is_dir():
        return []
    return sorted(int(path.name) for path in place.iterdir() if path.name.isdigit())


def list_releases(home: Home, name: str | None = None) -> list[Release]:
    """Every release, or those of one name; by name, newest first."""
    if name is not None and not versions(home, name):
        raise _no_release(home, name)
    names = [name] if name is not None else release_names(home)
    return [_load(home, each, version) for each in names for version in reversed(versions(home, each))]


def release_names(home: Home) -> list[str]:
    """Names with at least one version."""
    if not home.registry.is_dir():
        return []
    return sorted(path.name for path in home.registry.iterdir() if versions(home, path.name))


def verify(release: Release, *, progress: Progress = silent) -> None:
    """Raise BadModel when any file differs from what was published."""
    changes = manifests.changes(release.folder, release.manifest.files, progress)
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise BadModel(f"{release.text} is damaged: {', '.join(changes[:3])}{more}; publish it again as a new version")


# --- aliases


def aliases(home: Home, name: str) -> dict[str, int]:
    """Alias -> version."""
    return dict(_read_aliases(home, name)["aliases"])


def alias_history(home: Home, name: str) -> list[dict[str, Any]]:
    """Every move, oldest first: time, alias, version, previous."""
    return list(_read_aliases(home, name)["history"])


def set_alias(home: Home, name: str, alias: str, version: int) -> Release:
    """Point `alias` at a version, in one step for every reader."""
    _check_name("alias", alias)
    if alias.isdigit() or alias == "latest":
        raise BadInput(f"'{alias}' cannot be an alias, because versions use it; choose a word like production")
    release = resolve(home, f"{name}:{version}")
    with locked(home.registry / name / ".aliases.lock"):
        table = _read_aliases(home, name)
        move = {"time": time.time(), "alias": alias, "version": version, "previous": table["aliases"].get(alias)}
        table["aliases"][alias] = version
        write_json(home.registry / name / "aliases.json", {**table, "history": [*table["history"], move]})
    return release


def _read_aliases(home: Home, name: str) -> dict[str, Any]:
    path = home.registry / name / "aliases.json"
    return nan_safe_json.read_table(path) if path.is_file() else {"aliases": {}, "history": []}


def _version_of(home: Home, name: str, alias: str) -> int:
    if alias == "latest":
        return versions(home, name)[-1]
    table = aliases(home, name)
    if alias not in table:
        raise unknown("alias", alias, [*table, "latest"], where=f"of {name}")
    return table[alias]


# --- files


def _load(home: Home, name: str, version: int) -> Release:
    folder = home.registry / name / "versions" / str(version)
    table = nan_safe_json.read_table(folder / manifests.NAME)
    return Release(name=name, version=version, folder=folder, manifest=build(Manifest, table, f"{name}:{version}"))


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadInput(f"'{name}' cannot be a {kind} name; use small letters, digits, dots and dashes")


def _no_release(home: Home, name: str) -> NotFound:
    names = release_names(home)
    if not names:
        return NotFound(f"no release '{name}': {home.registry} is empty; publish one first")
    return unknown("release", name, names)
