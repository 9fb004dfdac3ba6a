"""Recorded traffic to replay: the Azure LLM inference traces (CSV) and Mooncake's (JSONL).

Azure: TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset, CC-BY). Mooncake: timestamp in milliseconds,
input_length, output_length, hash_ids, one for each block of 512 prompt tokens; equal ids are equal text.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from armillary.errors import BadData, NotFound
from armillary.serving.load.record import PlannedRequest

BLOCK_TOKENS = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")


def read_trace(path: Path) -> list[PlannedRequest]:
    """The trace's requests by time, the first at 0."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            rows = list(_mooncake(path, lines) if first.lstrip().startswith("{") else _azure(path, lines))
    except (FileNotFoundError, IsADirectoryError):
        raise NotFound(f"no trace '{path}'; give an Azure CSV or a Mooncake JSONL file") from None
    except UnicodeDecodeError:
        raise BadData(f"{path} is not text in UTF-8; give an Azure CSV or a Mooncake JSONL file") from None
    if not rows:
        raise BadData(f"{path} holds no request; give an Azure CSV or a Mooncake JSONL file")
    rows.sort(key=lambda row: row.at_s or 0.0)
    begin = rows[0].at_s or 0.0
    return [replace(row, at_s=(row.at_s or 0.0) - begin) for row in rows]


def _azure(path: Path, lines: Iterable[str]) -> Iterator[PlannedRequest]:
    table = csv.DictReader(lines)
    lacking = [name for name in _AZURE if name not in (table.fieldnames or ())]
    if lacking:
        raise BadData(f"{path} has no column {lacking[0]}; an Azure trace has {', '.join(_AZURE)}")
    for number, row in enumerate(table, start=2):
        try:
            at = datetime.fromisoformat(_microseconds(row["TIMESTAMP"])).timestamp()
            yield _planned(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError):
            raise BadData(f"{path}:{number} is not a time and two whole numbers; correct or remove the line") from None


def _microseconds(text: str) -> str:
    """Azure writes seven decimals of a second, Python reads six."""
    head, dot, digits = text.strip().partition(".")
    return f"{head}.{digits[:6]}" if dot and digits.isdigit() else text.strip()


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[PlannedRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            at, tokens_in, tokens_out = (row[key] for key in _MOONCAKE)
            blocks = tuple(int(name) for name in row.get("hash_ids", ()))
            yield _planned(float(at) / 1000, int(tokens_in), int(tokens_out), blocks)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise BadData(
                f"{path}:{number} is not a Mooncake request with {', '.join(_MOONCAKE)}; correct or remove the line"
            ) from None


def _planned(at: float, tokens_in: int, tokens_out: int, blocks: tuple[int, ...] = ()) -> PlannedRequest:
    if min(tokens_in, tokens_out) < 0:
        raise ValueError("a negative length")
    return PlannedRequest(at_s=at, tokens_in=max(1, tokens_in), tokens_out=max(1, tokens_out), blocks=blocks)
