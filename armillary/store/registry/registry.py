"""The registry of releases: versions that never change, aliases that move, files stored once by their checksum.

    blobs/ab/abcd…                 content of a file, named after its sha256; shared by all versions of all names
    NAME/versions/00000001.json    manifest of version 1: files, facts, signature
    NAME/aliases/00000001.json     first move of an alias (see alias_log.py)
    marks/                         writers in progress (see writer_marks.py)

A version exists once its manifest does, which is written last and only where its number is free. Whatever is loaded is
compared with the checksums first.
"""

from __future__ import annotations

import getpass
import random
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from armillary.errors import ArmillaryError, BadModel, NotFound, unknown
from armillary.store.atomic import Taken, remove_folder, staged_folder
from armillary.store.manifest import FileEntry, sha256
from armillary.store.progress import Progress, silent
from armillary.store.registry import alias_log, model_facts
from armillary.store.registry.alias_log import NUMBERED, AliasLog, Move
from armillary.store.registry.byte_count import ByteCount
from armillary.store.registry.object_store import LocalStore, ObjectStore
from armillary.store.registry.reference import check_alias, check_name, is_name, parse_reference
from armillary.store.registry.release import Release, ReleaseManifest, decode, digest_of, encode
from armillary.store.registry.signature import check_signature, sign
from armillary.store.registry.writer_marks import writing

_AT_ONCE = 4
_VERSIONS = "versions"
_GIVE_UP_S = 60.0


def blob_path(digest: str) -> str:
    return f"blobs/{digest[:2]}/{digest}"


class Registry:
    """The releases in a store; `cache` is a local folder for those that are loaded."""

    def __init__(self, store: ObjectStore, cache: Path, *, trusted: tuple[str, ...] = ()) -> None:
        """`trusted` are public keys: where there are any, only releases signed by one of them are loaded."""
        self.store, self.cache, self.trusted = store, cache, trusted

    # --- versions

    def push(
        self,
        name: str,
        folder: Path,
        *,
        run: str = "",
        note: str = "",
        evals: Mapping[str, float] | None = None,
        licence: str = "",
        sign_with: Path | None = None,
        progress: Progress = silent,
    ) -> Release:
        """Store a folder as the next version of `name`; the same content and facts again are the same version."""
        check_name("a release", name)
        model_facts.check_source(folder)
        count = ByteCount(progress, 2 * sum(path.stat().st_size for path in model_facts.files_in(folder)))
        stamps = {path.relative_to(folder).as_posix(): _stamp(path) for path in model_facts.files_in(folder)}
        files = self._hashed(folder, count)
        manifest = ReleaseManifest(
            name=name,
            created=time.time(),
            files=files,
            config=model_facts.config_summary(folder),
            tokenizer=model_facts.tokenizer_digest(files),
            weights=model_facts.weights(folder),
            quantization=model_facts.quantization(folder),
            run=run,
            evals=dict(evals or {}),
            licence=licence or model_facts.licence(folder),
            note=note,
        )
        if sign_with is not None:
            manifest = replace(manifest, signature=sign(manifest, sign_with))
        with writing(self.store, blobs={entry.sha256 for entry in files.values()}):
            self._upload(folder, files, stamps, count)
            return self._publish(manifest)

    def _hashed(self, folder: Path, count: ByteCount) -> dict[str, FileEntry]:
        paths = list(model_facts.files_in(folder))

        def entry(path: Path) -> FileEntry:
            digest, size = sha256(path), path.stat().st_size
            count(size)
            return FileEntry(bytes=size, sha256=digest)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            entries = list(pool.map(entry, paths))
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}

    def _upload(
        self, folder: Path, files: Mapping[str, FileEntry], stamps: Mapping[str, object], count: ByteCount
    ) -> None:
        """Send what the store lacks; `stamps` tell whether a file was changed since it was hashed."""
        for name, entry in files.items():
            path = blob_path(entry.sha256)
            if self.store.size(path) == entry.bytes:
                count(entry.bytes)
                continue
            self.store.put(folder / name, path, count)
            if _stamp(folder / name) != stamps[name]:
                self.store.remove(path)
                raise BadModel(f"{folder / name} changed while it was pushed; push it again once it is complete")

    def _publish(self, manifest: ReleaseManifest) -> Release:
        name, digest, data = manifest.name, digest_of(manifest), encode(manifest)
        deadline = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < deadline:
            with self.store.queue(f"{name}/{_VERSIONS}"):
                releases = self._all(name)
                same = next((release for release in releases if release.digest == digest), None)
                if same is not None and (same.manifest.signature or not manifest.signature):
                    return same
                version = max((release.version for release in releases), default=0) + 1
                if self.store.create(_manifest_path(name, version), data):
                    return Release(name=name, version=version, manifest=manifest)
            time.sleep(random.random() * 0.1)
        raise ArmillaryError(f"the versions of {name} are written by too many at once; push again")

    def versions(self, name: str) -> list[int]:
        """Published versions, in order; none for an unknown name."""
        if not is_name(name):
            return []
        names = self.store.names(f"{name}/{_VERSIONS}")
        return sorted(int(each[:-5]) for each in names if NUMBERED.fullmatch(each))

    def names(self) -> list[str]:
        """Names with at least one version."""
        return [name for name in self.store.names("") if self.versions(name)]

    def releases(self, name: str | None = None) -> list[Release]:
        """Every release, or those of one name; by name, newest first."""
        if name is not None and not self.versions(name):
            raise self._no_release(name)
        return [release for each in ([name] if name else self.names()) for release in reversed(self._all(each))]

    def resolve(self, text: str) -> Release:
        """The release that `name` (its newest), `name:version`, `name@alias` or `name@sha256:digest` stands for."""
        reference = parse_reference(text)
        name, known = reference.name, self.versions(reference.name)
        if not known:
            raise self._no_release(name)
        if reference.digest is not None:
            return self._by_digest(name, reference.digest)
        if reference.alias is not None:
            return self._by_alias(name, reference.alias)
        if reference.version is not None and reference.version not in known:
            raise NotFound(f"no version {reference.version} of {name}; it has {', '.join(map(str, known))}")
        return self._read(name, reference.version or known[-1])

    def _by_alias(self, name: str, alias: str) -> Release:
        table = AliasLog(self.store, name).table()
        if alias not in table:
            raise unknown("alias", alias, [*table, "latest"], where=f"of {name}")
        release = self._read(name, table[alias].version)
        if release.digest != table[alias].digest:
            raise BadModel(f"{release.text} is not what was promoted to {alias}; promote another version")
        return release

    def _by_digest(self, name: str, digest: str) -> Release:
        release = next((each for each in self._all(name) if each.digest.startswith(digest)), None)
        if release is None:
            raise NotFound(
                f"no version of {name} has the digest {digest[:16]}; armillary registry ls {name} lists them"
            )
        return release

    def _all(self, name: str) -> list[Release]:
        return [self._read(name, version) for version in self.versions(name)]

    def _read(self, name: str, version: int) -> Release:
        data = self.store.read(_manifest_path(name, version))
        if data is None:
            raise NotFound(f"{name}:{version} is gone; armillary registry ls {name} lists what is there")
        manifest = decode(data, f"{name}:{version}")
        if manifest.name != name:
            raise BadModel(f"{name}:{version} is a release of {manifest.name}; push the model again")
        return Release(name=name, version=version, manifest=manifest)

    def _no_release(self, name: str) -> NotFound:
        names = self.names()
        if not names:
            return NotFound(f"no release '{name}': {self.store.url} is empty; armillary registry push adds one")
        return unknown("release", name, names)

    # --- aliases

    def aliases(self, name: str) -> dict[str, int]:
        """Alias -> version."""
        return {alias: target.version for alias, target in AliasLog(self.store, name).table().items()}

    def history(self, name: str) -> list[Move]:
        """Every move of the name's aliases, oldest first."""
        return AliasLog(self.store, name).history()

    def promote(self, text: str, alias: str, *, expect: int | None = None) -> Release:
        """Point `alias` at a release; with `expect`, only while it points at that version (0: at none)."""
        check_alias(alias)
        release = self.resolve(text)
        self._move(release.name, alias, alias_log.promotion(alias, release.version, release.digest, expect), release)
        return release

    def rollback(self, name: str, alias: str) -> Release:
        """Point `alias` at the version it had before its last promotion."""
        check_alias(alias)
        if not self.versions(name):
            raise self._no_release(name)

        def digest(version: int) -> str | None:
            with suppress(NotFound):
                return self._read(name, version).digest
            return None

        self._move(name, alias, alias_log.rollback(alias, digest))
        return self.resolve(f"{name}@{alias}")

    def _move(self, name: str, alias: str, change: alias_log.Change, release: Release | None = None) -> None:
        with writing(self.store, versions=[release.text] if release else [f"{name}:{v}" for v in self.versions(name)]):
            if release is not None:
                self._read(name, release.version)  # a collection may have removed it meanwhile
            AliasLog(self.store, name).move(alias, change, by=_user())

    # --- files

    def load(self, release: Release, progress: Progress = silent) -> Path:
        """The release as a local folder whose every file has been compared with its checksum just now."""
        self.check_trust(release)
        target = self.cache / release.name / release.digest[:16]
        if target.is_dir():
            if not _changes(target, release.manifest, progress):
                return target
            remove_folder(target)
        with suppress(Taken):  # another process was faster
            self._fill(release, target, progress, link=True)
        return target

    def pull(self, release: Release, target: Path, progress: Progress = silent) -> Path:
        """Copy a release into a new folder."""
        self.check_trust(release)
        self._fill(release, target, progress, link=False)
        return target

    def verify(self, release: Release, progress: Progress = silent) -> None:
        """BadModel where a file in the store differs from what was pushed."""
        self.check_trust(release)
        with staged_folder(self.cache / release.name / f"verify-{release.digest[:16]}", overwrite=True) as folder:
            self._copy_files(release, folder, progress, link=True)
        remove_folder(self.cache / release.name / f"verify-{release.digest[:16]}")

    def check_trust(self, release: Release) -> None:
        """BadModel where only signed releases are loaded, and this one is not signed by a trusted key."""
        if self.trusted:
            check_signature(release, self.trusted)

    def _fill(self, release: Release, target: Path, progress: Progress, *, link: bool) -> None:
        with staged_folder(target) as folder:
            self._copy_files(release, folder, progress, link=link)

    def _copy_files(self, release: Release, folder: Path, progress: Progress, *, link: bool) -> None:
        """Bring the files and compare them; a link is a second name of the store's own file."""
        count = ByteCount(progress, 2 * release.manifest.bytes)
        for name, entry in release.manifest.files.items():
            path, source = folder / name, blob_path(entry.sha256)
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.store.size(source) is None:
                raise BadModel(f"{release.text} is damaged: {name} is missing; push the model again")
            if link and isinstance(self.store, LocalStore) and self.store.link(source, path):
                count(entry.bytes)
            else:
                self.store.get(source, path, count)
                path.chmod(0o444)
        changes = _changes(folder, release.manifest, count.rest)
        if changes:
            more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise BadModel(
                f"{release.text} is damaged in {self.store.url}: {', '.join(changes[:3])}{more}; "
                "delete its files in blobs/ and push the model again"
            )


def _changes(folder: Path, manifest: ReleaseManifest, progress: Callable[[int, int], None]) -> list[str]:
    """How a folder differs from a manifest, a few words per file."""
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    count = ByteCount(progress, manifest.bytes)

    def difference(name: str) -> str | None:
        entry, path = manifest.files[name], present.get(name)
        count(entry.bytes)
        if path is None:
            return f"{name} is missing"
        same = path.stat().st_size == entry.bytes and not path.is_symlink() and sha256(path) == entry.sha256
        return None if same else f"{name} was changed"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        changed = [text for text in pool.map(difference, manifest.files) if text]
    return [f"{name} was added" for name in sorted(present.keys() - manifest.files.keys())] + changed


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file is written."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _manifest_path(name: str, version: int) -> str:
    return f"{name}/{_VERSIONS}/{version:08}.json"


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
