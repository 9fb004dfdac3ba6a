"""Aliases of a name: names that move between versions, with every move on record.

    NAME/aliases/00000001.json, 00000002.json, …    one file per move, never changed

Each file has the move and the complete table after it, so that a reader needs only the last. A writer reads the last
table and creates the next file exclusively; where another was faster it reads again, so no move is lost.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.registry.object_store import ObjectStore

_GIVE_UP_S = 60.0
NUMBERED = re.compile(r"[0-9]{8}\.json")
_MOST_EARLIER = 100
"""versions that an alias can be rolled back through"""
MoveKind = Literal["promote", "rollback"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where an alias points, and where it pointed before, oldest first."""

    version: int
    digest: str
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Move:
    """One move of an alias, and all aliases after it."""

    number: int
    time: float  # unix seconds
    kind: MoveKind
    alias: str
    version: int
    previous: int | None = None
    by: str = ""  # user@host
    aliases: Mapping[str, Target] = field(default_factory=dict)


Change = Callable[[Mapping[str, Target]], tuple[MoveKind, Target] | None]
"""from the table now to the new target of an alias; None: nothing to do"""


class AliasLog:
    """The moves of one name's aliases."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name
        self._folder = f"{name}/aliases"

    def table(self) -> Mapping[str, Target]:
        """Alias -> target, now."""
        last = self._last()
        return last.aliases if last is not None else {}

    def history(self) -> list[Move]:
        """Every move, oldest first."""
        return [self._read(number) for number in self._numbers()]

    def move(self, alias: str, change: Change, *, by: str) -> Move | None:
        """Apply `change` to the table as it is when the move is written; None where there was nothing to do."""
        deadline = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < deadline:
            with self._store.queue(self._folder):
                move = self._next(alias, change, by)
                if move is None or self._store.create(self._path(move.number), _encode(move)):
                    return move
            time.sleep(random.random() * 0.1)
        raise ArmillaryError(f"the aliases of {self._name} are being moved by too many writers; try again")

    def _next(self, alias: str, change: Change, by: str) -> Move | None:
        """The move that follows the last one; None where there is nothing to do."""
        last = self._last()
        table = last.aliases if last is not None else {}
        wanted = change(table)
        if wanted is None:
            return None
        kind, target = wanted
        return Move(
            number=last.number + 1 if last is not None else 1,
            time=time.time(),
            kind=kind,
            alias=alias,
            version=target.version,
            previous=table[alias].version if alias in table else None,
            by=by,
            aliases={**table, alias: target},
        )

    def _numbers(self) -> list[int]:
        names = self._store.names(self._folder)
        return sorted(int(name[:-5]) for name in names if NUMBERED.fullmatch(name))

    def _last(self) -> Move | None:
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def _read(self, number: int) -> Move:
        path = self._path(number)
        try:
            move = build(Move, nan_safe_json.loads(self._store.read(path) or b""), path)
            if move.number != number:
                raise BadInput(f"it says that it is move {move.number}")
            return move
        except (ValueError, BadInput, RecursionError) as error:
            raise BadData(f"{self._store.url}/{path} is damaged ({error}); restore it or delete it") from None

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08}.json"


def _encode(move: Move) -> bytes:
    table: dict[str, Any] = to_plain(move)
    return (nan_safe_json.dumps(table, indent=1) + "\n").encode()


def promotion(alias: str, version: int, digest: str, expect: int | None) -> Change:
    """Point `alias` at a version; BadInput where it is not at `expect` any more."""

    def change(table: Mapping[str, Target]) -> tuple[MoveKind, Target] | None:
        now = table.get(alias)
        if expect is not None and (now.version if now else 0) != expect:
            at = f"at version {now.version}" if now else "not set"
            raise BadInput(f"alias {alias} is {at}, not at version {expect}; look at it and promote again")
        if now is not None and now.version == version:
            return None
        earlier = (*now.earlier, now.version)[-_MOST_EARLIER:] if now is not None else ()
        return "promote", Target(version=version, digest=digest, earlier=earlier)

    return change


def rollback(alias: str, digest_of: Callable[[int], str | None]) -> Change:
    """Point `alias` at the version it had before its last promotion; versions that are gone are passed over."""

    def change(table: Mapping[str, Target]) -> tuple[MoveKind, Target] | None:
        now = table.get(alias)
        if now is None:
            raise BadInput(f"alias {alias} is not set; promote a version to it first")
        earlier = list(now.earlier)
        while earlier:
            version = earlier.pop()
            digest = digest_of(version)
            if digest is not None:
                return "rollback", Target(version=version, digest=digest, earlier=tuple(earlier))
        raise BadInput(f"alias {alias} has no earlier version to go back to; promote another one instead")

    return change
