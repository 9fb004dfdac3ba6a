"""Marks by which writers and the garbage collector of a registry know of each other, on any store.

    marks/write-ID.json     a push or promotion in progress: the blobs and versions that it is going to refer to
    marks/collect.json      a garbage collection in progress, and when it ends at the latest

Each side writes its mark before it looks for the other's. So either the collector sees the writer's mark and spares
what it names, or the writer sees the collector's and waits.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from armillary.errors import BadInput
from armillary.store.registry.object_store import ObjectStore

_FOLDER, _COLLECT = "marks", "marks/collect.json"
_ABANDONED_S = 86_400.0
"""age after which the mark of a writer that was killed counts no more"""
COLLECT_S = 1800.0
"""time limit of a collection"""
_CLOCKS_S = 300.0
"""by which the clocks of two machines may differ"""
_POLL_S = 0.5


@contextmanager
def writing(store: ObjectStore, *, blobs: Collection[str] = (), versions: Collection[str] = ()) -> Iterator[None]:
    """Announce what will be referred to, and wait for a collection that is in progress."""
    path = f"{_FOLDER}/write-{secrets.token_hex(8)}.json"
    mark = {"time": time.time(), "blobs": sorted(blobs), "versions": sorted(versions)}
    store.create(path, json.dumps(mark).encode())
    try:
        while _is_collecting(store):
            time.sleep(_POLL_S)
        yield
    finally:
        store.remove(path)


@contextmanager
def collecting(store: ObjectStore) -> Iterator[float]:
    """Announce a collection; gives the time (unix seconds) at which it has to be over."""
    until = time.time() + COLLECT_S
    if not _is_collecting(store):
        store.remove(_COLLECT)  # of a collector that was killed
    if not store.create(_COLLECT, json.dumps({"until": until}).encode()):
        raise BadInput("another collection of this registry is in progress; wait until it is over")
    try:
        yield until - 60.0
    finally:
        store.remove(_COLLECT)


def announced(store: ObjectStore) -> tuple[set[str], set[str]]:
    """(blobs, versions) that writers in progress refer to; marks of writers that were killed long ago are removed."""
    blobs, versions = set[str](), set[str]()
    for name in store.names(_FOLDER):
        if not name.startswith("write-"):
            continue
        mark = _read(store, f"{_FOLDER}/{name}")
        if _number(mark, "time") < time.time() - _ABANDONED_S:
            store.remove(f"{_FOLDER}/{name}")
        blobs |= _texts(mark, "blobs")
        versions |= _texts(mark, "versions")
    return blobs, versions


def _is_collecting(store: ObjectStore) -> bool:
    """A mark that claims more time than a collection may take is none: it would make all writers wait for ever."""
    return 0 < _number(_read(store, _COLLECT), "until") - time.time() < COLLECT_S + _CLOCKS_S


def _read(store: ObjectStore, path: str) -> dict[str, Any]:
    """A mark; one that is damaged says nothing."""
    try:
        table = json.loads(store.read(path) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _number(mark: dict[str, Any], name: str) -> float:
    value = mark.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def _texts(mark: dict[str, Any], name: str) -> set[str]:
    values = mark.get(name)
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()
