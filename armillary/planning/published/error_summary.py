"""The errors of a table in a few numbers: mean absolute, median absolute, bias, worst; as fractions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def summarise(errors: Sequence[float]) -> dict[str, Any]:
    """rows, mape, median, bias and worst of signed relative errors; None where there are none."""
    if not errors:
        return {"rows": 0, "mape": None, "median": None, "bias": None, "worst": None}
    signed = np.asarray(errors, dtype=float)
    size = np.abs(signed)
    return {
        "rows": len(errors),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(signed.mean()),
        "worst": float(signed[int(np.argmax(size))]),
    }


def by_group(pairs: Iterable[tuple[str, float]]) -> dict[str, dict[str, Any]]:
    """The summary of each group, largest first."""
    groups: dict[str, list[float]] = {}
    for name, error in pairs:
        groups.setdefault(name, []).append(error)
    return {name: summarise(errors) for name, errors in sorted(groups.items(), key=lambda item: -len(item[1]))}


def merged(summary: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**summary, **more}
