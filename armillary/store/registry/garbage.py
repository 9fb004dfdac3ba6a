"""Garbage collection of a registry: old versions on request, and blobs that no version refers to."""

from __future__ import annotations

import time
from dataclasses import dataclass

from armillary.errors import ArmillaryError
from armillary.store.atomic import sweep_folder
from armillary.store.registry.alias_log import AliasLog
from armillary.store.registry.object_store import LocalStore
from armillary.store.registry.registry import Registry, blob_path
from armillary.store.registry.writer_marks import announced, collecting

_ROLLBACKS = 1
"""earlier versions of each alias that stay, so that it can be rolled back"""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was removed, or would be."""

    versions: tuple[str, ...]
    blobs: int
    bytes: int


def collect(registry: Registry, *, keep: int | None = None, dry_run: bool = False) -> Collected:
    """Remove blobs without a version. With `keep`, first remove versions that are not among the newest `keep` of their
    name, have no alias, and are not what an alias would be rolled back to."""
    with collecting(registry.store) as until:
        spared_blobs, spared_versions = announced(registry.store)
        old = [] if keep is None else [text for text in _old(registry, keep) if text not in spared_versions]
        gone = set(old)
        used = spared_blobs | {
            entry.sha256
            for release in registry.releases()
            if release.text not in gone
            for entry in release.manifest.files.values()
        }
        unused = {blob: size for blob, size in _blobs(registry).items() if blob not in used}
        if not dry_run:
            _remove(registry, old, list(unused), until)
    return Collected(versions=tuple(old), blobs=len(unused), bytes=sum(unused.values()))


def _old(registry: Registry, keep: int) -> list[str]:
    assert keep > 0, "the newest version stays, or its number would be used twice"
    old = []
    for name in registry.names():
        targets = AliasLog(registry.store, name).table().values()
        needed = {target.version for target in targets}
        needed |= {version for target in targets for version in target.earlier[-_ROLLBACKS:]}
        old += [f"{name}:{version}" for version in registry.versions(name)[:-keep] if version not in needed]
    return old


def _blobs(registry: Registry) -> dict[str, int]:
    store = registry.store
    digests = [digest for part in store.names("blobs") for digest in store.names(f"blobs/{part}")]
    return {digest: store.size(blob_path(digest)) or 0 for digest in digests}


def _remove(registry: Registry, versions: list[str], blobs: list[str], until: float) -> None:
    """Manifests first, so that no version ever lacks a file."""
    store = registry.store
    manifests = [f"{name}/versions/{int(version):08}.json" for name, _, version in (v.partition(":") for v in versions)]
    for path in [*manifests, *map(blob_path, blobs)]:
        if time.time() > until:
            raise ArmillaryError("the collection took too long and stopped; start it again to go on")
        store.remove(path)
    if isinstance(store, LocalStore):
        for folder in (store.root, *(path for path in store.root.rglob("*") if path.is_dir())):
            sweep_folder(folder)
