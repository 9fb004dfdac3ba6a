"""Follows an alias of the registry: a version promoted to it is loaded beside the one that serves, then replaces it.

Requests in flight finish on the version that they began on. A version that cannot be loaded is reported once, and the
old one stays. Both models are in memory for a moment: where the device has no space for two, roll replicas instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.errors import ArmillaryError
from armillary.serving.http.server import Say
from armillary.serving.openai.served_model import ServedModel
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.registry.open_registry import PREFIX, open_registry, split_address
from armillary.store.registry.reference import parse_reference
from armillary.store.registry.registry import Registry
from armillary.store.registry.release import Release
from armillary.store.resolve_model import ModelSource

if TYPE_CHECKING:
    from armillary.serving.openai.app import Api

Build = Callable[[Release, Path], ServedModel]
_IDLE_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FollowedAlias:
    """A reference that may stand for another release later, and the one it stood for."""

    registry: Registry
    reference: str  # NAME@ALIAS, or NAME for its newest version
    release: Release
    poll_s: float


def followed_alias(home: Home, text: str, source: ModelSource, serve: Serve) -> FollowedAlias | None:
    """What a server of `text` follows; None where it is no release, or one that cannot change."""
    if source.release is None or not text.startswith(PREFIX) or not serve.registry_poll_s:
        return None
    url, reference = split_address(text)
    if not parse_reference(reference).moves:
        return None
    registry = open_registry(home, url, serve.trusted_keys)
    return FollowedAlias(registry=registry, reference=reference, release=source.release, poll_s=serve.registry_poll_s)


class PromotionWatcher:
    """Watches an alias while a server runs."""

    def __init__(self, api: Api, followed: FollowedAlias, build: Build, say: Say) -> None:
        self._api, self._followed, self._build, self._say = api, followed, build, say
        self._refused = ""  # digest of a release that could not be served
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        self._old: list[ServedModel] = []

    def start(self, started: asyncio.Task[None]) -> None:
        """Begin to watch, once the server's first engine has started."""
        if not started.cancelled() and started.exception() is None:
            self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(old.engine.stop() for old in self._old))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._followed.poll_s)
            release = await self._changed()
            if release is None:
                continue
            try:
                await self._switch(release)
            except Exception as error:  # whatever a model raises, the watch must go on
                self._refused = release.digest
                current = self._followed.release.text
                self._say(f"{release.text} cannot be served, {current} stays: {' '.join(str(error).split())}")

    async def _changed(self) -> Release | None:
        """The release that the alias stands for now, where it is another one; a store that fails is reported once."""
        try:
            release = await asyncio.to_thread(self._followed.registry.resolve, self._followed.reference)
        except ArmillaryError as error:
            if str(error) != self._problem:
                self._say(f"the registry cannot be read, {self._followed.release.text} stays: {error}")
            self._problem = str(error)
            return None
        self._problem = ""
        return None if release.digest in (self._followed.release.digest, self._refused) else release

    async def _switch(self, release: Release) -> None:
        """Load a release, serve new requests with it, and end the old engine after its last request."""
        self._say(f"{self._followed.reference} is {release.text} now; loading it beside {self._followed.release.text}")
        folder = await asyncio.to_thread(self._followed.registry.load, release)
        served = await asyncio.to_thread(self._build, release, folder)
        try:
            await served.engine.start()
        except BaseException:
            await served.engine.stop()
            raise
        old = self._api.replace_model(served)
        self._old.append(old)
        self._followed, self._refused = replace(self._followed, release=release), ""
        self._say(f"serving {release.text}")
        while self._api.requests_of(old):
            await asyncio.sleep(_IDLE_POLL_S)
        await old.engine.stop()
        self._old.remove(old)
