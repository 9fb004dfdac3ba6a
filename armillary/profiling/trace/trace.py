"""A trace as columns: what ran when, on which thread or stream, whichever program recorded it.

Millions of events fit in memory because a column holds one number per event and every text is stored once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from struct import Struct
from typing import Any

import numpy as np

Array = Any
"""a numpy array: numpy's own types are not followed"""

KINDS = ("op", "annotation", "python", "runtime", "kernel", "memcpy", "memset")
OP, ANNOTATION, PYTHON, RUNTIME, KERNEL, MEMCPY, MEMSET = range(len(KINDS))
HOST_KINDS = (OP, ANNOTATION, PYTHON, RUNTIME)


@dataclass(frozen=True)
class Signature:
    """What an operator was called with."""

    dims: tuple[Any, ...] = ()
    """a shape per argument; a list of tensors is a tuple of shapes"""
    types: tuple[str, ...] = ()
    """torch's name of each argument's type"""
    concrete: tuple[str, ...] = ()
    """scalar arguments as text; only where a model of the work needs them"""
    strides: tuple[Any, ...] = ()
    """strides per argument; only where one is expanded (a stride of 0)"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Allocations and frees, in the order of time (seconds from the beginning of the trace); device -1 is the host."""

    start: Array
    change: Array
    """bytes, negative for a free"""
    total: Array
    """bytes in use on that device afterwards, as the allocator counts them"""
    address: Array
    device: Array
    thread: Array


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events in columns, sorted by start (seconds from the beginning of the trace); an index of -1 is none. Every
    name, thread, signature and detail is stored once."""

    source: str
    kind: Array
    name: Array
    start: Array
    seconds: Array
    thread: Array
    """index into threads; of a device event: its stream"""
    device: Array
    """number of the device, -1 on the host"""
    correlation: Array
    """joins a launch and what it launched; -1: none"""
    external: Array
    """joins a launch and its operator where the trace says so; -1: none"""
    sequence: Array
    """joins an operator and its backward; -1: none"""
    signature: Array
    detail: Array
    size: Array
    """bytes of a copy; -1 elsewhere"""
    names: tuple[str, ...]
    threads: tuple[str, ...]
    """'pid/tid' or 'device/stream'"""
    signatures: tuple[Signature, ...] = ()
    details: tuple[Mapping[str, Any], ...] = ()
    """grid, block, registers … each combination once; call stack and module of old traces"""
    memory: Memory | None = None
    devices: tuple[str, ...] = ()
    device_bytes: tuple[float, ...] = ()
    """memory of the devices, by number; 0 where the trace does not say"""
    world: int = 1
    """processes of the job, where the trace says"""

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def end(self) -> Array:
        return self.start + self.seconds

    @cached_property
    def on_device(self) -> Array:
        """Which events ran on an accelerator."""
        return self.kind >= KERNEL

    def name_of(self, event: int) -> str:
        return self.names[int(self.name[event])]

    def matching(self, holds: Callable[[str], bool]) -> Array:
        """Which events have a name for which `holds` is true; each name is asked once."""
        return np.array([holds(name) for name in self.names], dtype=bool)[self.name]


# --- building one

_COLUMNS: dict[str, str] = {
    "kind": "b",
    "name": "i",
    "start": "d",
    "seconds": "d",
    "thread": "i",
    "device": "h",
    "correlation": "q",
    "external": "q",
    "sequence": "q",
    "signature": "i",
    "detail": "i",
    "size": "d",
}
_MEMORY: dict[str, str] = {"start": "d", "change": "q", "total": "q", "address": "q", "device": "h", "thread": "i"}
_PACK, _PACK_MEMORY = (Struct("=" + "".join(codes.values())).pack for codes in (_COLUMNS, _MEMORY))
"""packs a row into bytes: one call per event instead of one per column"""


@dataclass
class TraceBuilder:
    """Takes events one by one and packs them into columns."""

    source: str
    rows: bytearray = field(default_factory=bytearray)
    """grows by one row per event"""
    blocks: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    signatures: dict[Any, tuple[int, Signature]] = field(default_factory=dict)
    """key -> number and signature; details likewise"""
    details: dict[Any, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)

    def add(
        self,
        kind: int,
        name: str,
        start: float,
        seconds: float,
        thread: str,
        *,
        device: int = -1,
        correlation: int = -1,
        external: int = -1,
        sequence: int = -1,
        signature: int = -1,
        detail: int = -1,
        size: float = -1,
    ) -> None:
        names, threads = self.names, self.threads
        self.rows += _PACK(
            kind,
            names.setdefault(name, len(names)),
            start,
            seconds,
            threads.setdefault(thread, len(threads)),
            device,
            correlation,
            external,
            sequence,
            signature,
            detail,
            size,
        )

    def add_memory(self, start: float, change: int, total: int, address: int, device: int, thread: str) -> None:
        who = self.threads.setdefault(thread, len(self.threads))
        self.blocks += _PACK_MEMORY(start, change, total, address, device, who)

    def intern_signature(self, key: Any, dims: Any, types: Any, concrete: Any, strides: Any = ()) -> int:
        entry = self.signatures.get(key)
        if entry is None:
            texts = tuple(map(str, types)), tuple(map(str, concrete))
            entry = len(self.signatures), Signature(_frozen(dims), *texts, _frozen(strides))
            self.signatures[key] = entry
        return entry[0]

    def intern_detail(self, key: Any, detail: Mapping[str, Any]) -> int:
        return self.details.setdefault(key, (len(self.details), detail))[0]

    def finish(self, **about: Any) -> Trace:
        """The trace, in the order of time, its first event at 0."""
        columns = _columns(self.rows, _COLUMNS)
        origin = columns["start"].min() if len(columns["start"]) else 0.0
        order = np.lexsort((-columns["seconds"], columns["start"]))
        columns = {name: values[order] for name, values in columns.items()}
        columns["start"] = columns["start"] - origin
        return Trace(
            source=self.source,
            **columns,
            names=tuple(self.names),
            threads=tuple(self.threads),
            signatures=tuple(signature for _, signature in self.signatures.values()),
            details=tuple(detail for _, detail in self.details.values()),
            memory=self._memory(origin),
            **about,
        )

    def _memory(self, origin: float) -> Memory | None:
        if not self.blocks:
            return None
        columns = _columns(self.blocks, _MEMORY)
        order = np.argsort(columns["start"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
        columns["start"] = columns["start"] - origin
        return Memory(**columns)


def _columns(rows: bytearray, codes: Mapping[str, str]) -> dict[str, Array]:
    table = np.frombuffer(rows, dtype=np.dtype(list(codes.items())))
    return {name: np.ascontiguousarray(table[name]) for name in codes}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
