"""The version that answers now, and the next one: loaded and tried beside it, then put in its place.

A request belongs to the version it was checked against; the old one finishes what it has and goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import ArmillaryError
from armillary.serving.predict.batcher import Batcher, Limits, Note
from armillary.serving.predict.model import Loaded, open_file
from armillary.serving.predict.schema import Schema
from armillary.serving.predict.trust import Trust
from armillary.serving.predict.versions import Release, newest
from armillary.spec.tables.predict import Predict

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Version:
    """A loaded model with its queue."""

    release: Release
    schema: Schema
    batcher: Batcher


class Live:
    """Holds the current version and watches for the next."""

    def __init__(self, path: Path, settings: Predict, say: Say, note: Note, trust: Trust) -> None:
        self.path, self.settings = path, settings
        self._say, self._note, self._trust = say, note, trust
        self.current: Version | None = None
        self.reloads = 0
        self.problem = ""
        self._refused: tuple[int, int, int] | None = None
        self.leaving: set[asyncio.Task[None]] = set()
        """versions that finish what they have"""

    async def load(self) -> Version:
        """Load the newest version and make it the current one."""
        release = newest(self.path)
        loaded = await asyncio.to_thread(self._open, release.file)
        old, self.current = self.current, self._version(release, loaded)
        self._say(f"version {release.name}: {self._words(loaded)}")
        if old is not None:
            self.reloads += 1
            task = asyncio.create_task(old.batcher.close())
            self.leaving.add(task)
            task.add_done_callback(self.leaving.discard)
        self.problem = ""
        return self.current

    def _open(self, file: Path) -> Loaded:
        self._trust.check(file)
        return open_file(file, self.settings)

    async def watch(self) -> None:
        """Look for a new version for ever; one that cannot be loaded is refused once, and the old one stays."""
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
            except Exception as error:  # libraries raise anything, and the old version has to go on being watched
                self.problem, self._refused = f"version {release.name}: {error}", release.mark
                self._say(f"kept the old version: {self.problem}")

    def _changed(self) -> Release | None:
        """A version that is neither current nor refused."""
        try:
            release = newest(self.path)
        except (ArmillaryError, OSError):
            return None  # being replaced
        known = (self.current.release.mark if self.current else None, self._refused)
        return None if release.mark in known else release

    async def close(self) -> None:
        """Let every queue run empty."""
        if self.current is not None:
            await self.current.batcher.close()
        await asyncio.gather(*self.leaving)

    def _version(self, release: Release, loaded: Loaded) -> Version:
        settings, schema = self.settings, loaded.schema
        most = schema.fixed_rows or min(settings.max_batch, schema.max_rows or settings.max_batch)
        limits = Limits(
            max_batch=most if schema.batched and settings.max_batch > 1 else 1,
            max_delay_s=settings.max_delay_s,
            max_queue=settings.max_queue,
            preferred=tuple(size for size in settings.preferred if size <= most),
            fixed_rows=schema.fixed_rows,
        )
        if limits.max_batch == 1:
            limits = Limits(max_batch=1, max_delay_s=0.0, max_queue=settings.max_queue, fixed_rows=schema.fixed_rows)
        return Version(release=release, schema=schema, batcher=Batcher(loaded.model.run, limits, self._note))

    def _words(self, loaded: Loaded) -> str:
        schema = loaded.schema
        takes = ", ".join(f"{field.name} {field.words}" for field in schema.inputs)
        gives = ", ".join(f"{field.name} {field.words}" for field in schema.outputs)
        return f"{takes} → {gives}" + (f" · {loaded.note}" if loaded.note else "")
