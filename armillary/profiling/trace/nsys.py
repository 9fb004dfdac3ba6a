"""Nsight Systems traces as columns: the SQLite file that `nsys export --type sqlite` writes.

It holds launches, kernels, copies and NVTX ranges. torch's `emit_nvtx` writes operators as ranges; without it only the
CUDA calls of the host are known.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from armillary.errors import BadData
from armillary.profiling.trace.trace import ANNOTATION, KERNEL, MEMCPY, MEMSET, OP, RUNTIME, Trace, TraceBuilder

_NS = 1e-9
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PAGEABLE = 0
_OPERATOR = re.compile(r"^(aten|c10d|autograd|prims|torch)::")
_VERSION = re.compile(r"_(v\d+|ptsz|ptds)\w*$")


def read(path: Path) -> Trace:
    builder = TraceBuilder(source=str(path))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {row[0] for row in database.execute("select name from sqlite_master where type='table'")}
            if not tables & {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"}:
                raise BadData(f"{path} is SQLite but no nsys export; make one with nsys export --type sqlite")
            database.row_factory = sqlite3.Row
            _take_all(builder, database, tables)
            devices = _devices(database, tables)
    except IndexError as error:  # a Row's way to say that it has no such column
        raise BadData(f"{path} lacks a column of nsys exports ({error}); export it with a recent nsys") from None
    except sqlite3.DatabaseError as error:
        raise BadData(f"{path} is a broken SQLite file ({error}); export it again") from None
    return builder.finish(devices=tuple(name for name, _ in devices), device_bytes=tuple(size for _, size in devices))


def _take_all(builder: TraceBuilder, database: sqlite3.Connection, tables: set[str]) -> None:
    texts = dict(database.execute("select id, value from StringIds").fetchall()) if "StringIds" in tables else {}
    kernel_columns = {row["name"] for row in database.execute("pragma table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
    processes: dict[int, int] | None = {} if "globalPid" in kernel_columns else None
    for row in _rows(database, tables, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        name = _VERSION.sub("", str(texts.get(row["nameId"], "runtime")))
        builder.add(RUNTIME, name, *_span(row), _host(row), correlation=_correlation(row, processes))
    for row in _rows(database, tables, "CUPTI_ACTIVITY_KIND_KERNEL"):
        detail = _detail(row)
        builder.add(
            KERNEL,
            str(texts.get(row["demangledName"], "kernel")),
            *_span(row),
            _stream(row),
            device=row["deviceId"],
            correlation=_correlation(row, processes),
            detail=builder.intern_detail(str(detail), detail),
        )
    for row in _rows(database, tables, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):  # a graph as one, unless nodes are asked for
        builder.add(
            KERNEL,
            "CUDA graph",
            *_span(row),
            _stream(row),
            device=row["deviceId"],
            correlation=_correlation(row, processes),
        )
    for kind, table in ((MEMCPY, "CUPTI_ACTIVITY_KIND_MEMCPY"), (MEMSET, "CUPTI_ACTIVITY_KIND_MEMSET")):
        for row in _rows(database, tables, table):
            builder.add(
                kind,
                _copy_name(row) if kind == MEMCPY else "Memset (Device)",
                *_span(row),
                _stream(row),
                device=row["deviceId"],
                correlation=_correlation(row, processes),
                size=float(row["bytes"]),
            )
    for row in _rows(database, tables, "NVTX_EVENTS"):
        text = row["text"] or texts.get(_get(row, "textId"))
        if text and row["end"] is not None:
            kind = OP if _OPERATOR.match(text) else ANNOTATION
            builder.add(kind, str(text).partition(", seq =")[0], *_span(row), _host(row))


def _rows(database: sqlite3.Connection, tables: set[str], table: str) -> Iterator[sqlite3.Row]:
    if table in tables:
        yield from database.execute(f"select * from {table} order by start")


def _correlation(row: sqlite3.Row, processes: dict[int, int] | None) -> int:
    """Every process counts its calls from one: its index goes into the upper bits. Old exports name no process."""
    if not row["correlationId"] or processes is None:
        return row["correlationId"] or -1
    process = int(_get(row, "globalPid") or _get(row, "globalTid") or 0) >> 24 & 0xFFFFFF
    return processes.setdefault(process, len(processes)) << 40 | int(row["correlationId"])


def _span(row: sqlite3.Row) -> tuple[float, float]:
    return row["start"] * _NS, max(0, row["end"] - row["start"]) * _NS


def _host(row: sqlite3.Row) -> str:
    """nsys packs process and thread into one number: 24 bits each, the thread lowest."""
    both = int(row["globalTid"] or 0)
    return f"{(both >> 24) & 0xFFFFFF}/{both & 0xFFFFFF}"


def _stream(row: sqlite3.Row) -> str:
    return f"{row['deviceId']}/{row['streamId']}"


def _detail(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "grid": [row["gridX"], row["gridY"], row["gridZ"]],
        "block": [row["blockX"], row["blockY"], row["blockZ"]],
        "registers": _get(row, "registersPerThread"),
        "shared_bytes": (_get(row, "staticSharedMemory") or 0) + (_get(row, "dynamicSharedMemory") or 0),
    }


def _copy_name(row: sqlite3.Row) -> str:
    """In Kineto's words, so that one rule reads both."""
    way = _COPIES.get(row["copyKind"], "copy")
    pageable = way in ("HtoD", "DtoH") and _PAGEABLE in (_get(row, "srcKind"), _get(row, "dstKind"))
    return f"Memcpy {way} ({'Pageable' if pageable else 'Device or pinned'})"


def _get(row: sqlite3.Row, column: str) -> Any:
    # a Row is searched by value unless its keys are asked
    return row[column] if column in row.keys() else None  # noqa: SIM118


def _devices(database: sqlite3.Connection, tables: set[str]) -> list[tuple[str, float]]:
    if "TARGET_INFO_GPU" not in tables:
        return []
    rows = database.execute("select * from TARGET_INFO_GPU order by id").fetchall()
    return [(str(row["name"]), float(_get(row, "totalMemory") or 0)) for row in rows]
