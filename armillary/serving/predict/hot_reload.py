"""Hot reload: a new version is loaded and tested while the current one serves, and then replaces it.

A request runs on the version that validated it; the old version finishes its queue and closes.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import ArmillaryError
from armillary.serving.http.server import Say
from armillary.serving.predict.batcher import Batcher, BatchLimits, BatchObserver
from armillary.serving.predict.model import LoadedModel, open_file
from armillary.serving.predict.schema import Schema
from armillary.serving.predict.trusted_files import FileTrust
from armillary.serving.predict.versions import ModelVersion, newest
from armillary.spec.tables.serve import Predict


@dataclass(frozen=True, kw_only=True)
class LoadedVersion:
    """A loaded model with its queue."""

    release: ModelVersion
    schema: Schema
    batcher: Batcher


class HotReloader:
    """The current version, and the watch for the next."""

    def __init__(self, path: Path, settings: Predict, say: Say, observe: BatchObserver, trust: FileTrust) -> None:
        self.path, self.settings = path, settings
        self._say, self._observe, self._trust = say, observe, trust
        self.current: LoadedVersion | None = None
        self.reloads = 0
        self.problem = ""
        self._refused: tuple[int, int, int] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def load(self) -> LoadedVersion:
        """Load the newest version and make it the current one."""
        release = newest(self.path)
        loaded = await asyncio.to_thread(self._open, release.file)
        old, self.current = self.current, self._version(release, loaded)
        self._say(f"version {release.name}: {_describe(loaded)}")
        if old is not None:
            self.reloads += 1
            task = asyncio.create_task(old.batcher.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self.problem = ""
        return self.current

    def _open(self, file: Path) -> LoadedModel:
        self._trust.check(file)
        return open_file(file, self.settings)

    async def watch(self) -> None:
        """Watch for a new version; one that cannot be loaded is reported once, and the old one stays."""
        while self.settings.reload_s:
            await asyncio.sleep(self.settings.reload_s)
            release = self._changed()
            if release is None:
                continue
            await asyncio.sleep(min(0.2, self.settings.reload_s))
            if self._changed() != release:
                continue  # still being written
            try:
                await self.load()
            except Exception as error:  # libraries raise anything, and the watch must go on
                self.problem, self._refused = f"version {release.name}: {error}", release.mark
                self._say(f"kept the old version: {self.problem}")

    def _changed(self) -> ModelVersion | None:
        """A version that is neither current nor refused."""
        try:
            release = newest(self.path)
        except (ArmillaryError, OSError):
            return None  # being replaced
        known = (self.current.release.mark if self.current else None, self._refused)
        return None if release.mark in known else release

    async def close(self) -> None:
        """Run every queue empty."""
        if self.current is not None:
            await self.current.batcher.close()
        await asyncio.gather(*self._closing)

    def _version(self, release: ModelVersion, loaded: LoadedModel) -> LoadedVersion:
        settings, schema = self.settings, loaded.schema
        max_batch = schema.fixed_rows or min(settings.max_batch, schema.max_rows or settings.max_batch)
        limits = BatchLimits(
            max_batch=max_batch if schema.batched and settings.max_batch > 1 else 1,
            max_delay_s=settings.max_delay_s,
            max_queue=settings.max_queue,
            preferred=tuple(size for size in settings.preferred if size <= max_batch),
            fixed_rows=schema.fixed_rows,
        )
        if limits.max_batch == 1:
            limits = BatchLimits(
                max_batch=1, max_delay_s=0.0, max_queue=settings.max_queue, fixed_rows=schema.fixed_rows
            )
        return LoadedVersion(release=release, schema=schema, batcher=Batcher(loaded.model.run, limits, self._observe))


def _describe(loaded: LoadedModel) -> str:
    schema = loaded.schema
    inputs = ", ".join(f"{field.name} {field.text}" for field in schema.inputs)
    outputs = ", ".join(f"{field.name} {field.text}" for field in schema.outputs)
    return f"{inputs} → {outputs}" + (f" · {loaded.note}" if loaded.note else "")
