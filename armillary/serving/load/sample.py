"""A request for a predict server, made up from what its /schema says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

_FREE = 8


def sample_of(schema: dict[str, Any]) -> bytes:
    """The JSON of one row that fits; free sizes are 8."""
    dice = Random(0)
    fields = schema.get("inputs") or []
    rows = {field["name"]: _values(_shape(field, schema), field["dtype"], dice) for field in fields}
    body = {"features": next(iter(rows.values()))} if len(rows) == 1 else {"inputs": rows}
    return json.dumps(body).encode()


def _shape(field: dict[str, Any], schema: dict[str, Any]) -> list[int]:
    sizes = field["shape"] or [None, None]
    return [_FREE if size is None else size for size in (sizes[1:] if schema.get("batched") else sizes)]


def _values(shape: Sequence[int], dtype: str, dice: Random) -> Any:
    if shape:
        return [_values(shape[1:], dtype, dice) for _ in range(shape[0])]
    if "float" in dtype:
        return round(dice.gauss(0.0, 1.0), 4)
    return bool(dice.getrandbits(1)) if dtype == "bool" else dice.randrange(2)
