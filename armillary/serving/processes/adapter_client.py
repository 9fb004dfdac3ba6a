"""The server's side of LoRA adapters: names that clients use, and the loading of them into the engine.

An engine knows each adapter under a key of its own, never used twice, so that a name may stand for other weights later
while requests and cached prompts of the former adapter stay what they were.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.processes.engine_ipc import AdapterResult, LoadAdapter, UnloadAdapter


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter by its key in the engine."""

    key: str
    folder: Path


class AdapterClient:
    """The adapters of one engine."""

    def __init__(self, send: Callable[[Any], None], adapters: dict[str, Path]) -> None:
        """`adapters` are there from the start."""
        self._send = send
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._loading: set[str] = set()
        self.loaded = {name: self._new(name, folder) for name, folder in adapters.items()}

    def _new(self, name: str, folder: Path) -> LoadedAdapter:
        return LoadedAdapter(key=f"{name}#{next(self._numbers)}", folder=folder)

    @property
    def for_engine(self) -> tuple[tuple[str, str], ...]:
        """(key, folder) of each, for an engine that starts."""
        return tuple((adapter.key, str(adapter.folder)) for adapter in self.loaded.values())

    async def load(self, name: str, folder: Path) -> None:
        """Problem 400 where the engine cannot load it."""
        if name in self.loaded or name in self._loading:
            raise bad_request(f"an adapter '{name}' is loaded already; unload it first", "lora_name")
        adapter, number = self._new(name, folder), next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._loading.add(name)
        try:
            self._send(LoadAdapter(number=number, key=adapter.key, folder=str(folder)))
            error = await self._waiting[number]
        finally:
            self._waiting.pop(number, None)
            self._loading.discard(name)
        if error:
            raise bad_request(error, "lora_path")
        self.loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Requests that use it end as they began. Problem 404 where there is none."""
        adapter = self.loaded.pop(name, None)
        if adapter is None:
            raise Problem(404, f"no adapter '{name}' is loaded; /v1/models lists them", param="lora_name")
        self._send(UnloadAdapter(key=adapter.key))

    def take(self, result: AdapterResult) -> None:
        waiting = self._waiting.get(result.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(result.error)

    def engine_lost(self) -> None:
        """What was being loaded was not."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Problem(503, "the engine failed; load the adapter again", code="engine_failed"))

    def forget(self, keys: dict[str, str]) -> list[str]:
        """Adapters that an engine could not load when it started, by their keys; a line for each."""
        lost = [name for name, adapter in self.loaded.items() if adapter.key in keys]
        return [f"adapter '{name}' is gone: {keys[self.loaded.pop(name).key]}" for name in lost]
