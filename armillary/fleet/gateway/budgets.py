"""Budgets of keys: tokens and dollars per calendar day or month (UTC), as charges beside those of the limits.

The most that a request may cost is taken from the budget when it starts, and what it did not use is returned when it
ends, so a budget is never exceeded. Dollars are counted in billionths, as whole numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import DecodeError
from msgspec.json import decode

from armillary.fleet.gateway.keys import ApiKey, Budget
from armillary.fleet.gateway.limits import Charge

USD = 1_000_000_000
"""of the unit that dollars are counted in"""


def period_of(budget: Budget, now: float) -> tuple[str, float]:
    """(name, end in unix seconds) of the day or month that contains `now`."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if budget.period == "day":
        return f"{today:%Y-%m-%d}", (today + timedelta(days=1)).timestamp()
    first = today.replace(day=1)
    return f"{first:%Y-%m}", (first + timedelta(days=32)).replace(day=1).timestamp()


def budget_charges(key: ApiKey, tokens: int, usd: float, now: float | None = None) -> list[Charge]:
    """What a request that may take so much takes from the budgets of its key."""
    budget, charges = key.budget, list[Charge]()
    if not budget.is_set:
        return charges
    name, ends_at = period_of(budget, time.time() if now is None else now)
    if budget.tokens is not None:
        charges.append(Charge(f"{key.id}:{name}:tokens", tokens, budget.tokens, 0.0, ends_at))
    if budget.usd is not None:
        charges.append(Charge(f"{key.id}:{name}:usd", to_units(usd), to_units(budget.usd), 0.0, ends_at))
    return charges


def to_units(usd: float) -> int:
    return round(usd * USD)


def spent_before(audit: Path, keys: Mapping[str, ApiKey], now: float) -> dict[str, int]:
    """Bucket -> what was spent in the period that contains `now`, from the audit log of earlier runs."""
    budgets = {key.id: key.budget for key in keys.values() if key.budget.is_set}
    if not budgets or not audit.is_file():
        return {}
    totals: dict[str, int] = {}
    with audit.open("rb") as file:
        for row in _rows(file):
            budget = budgets.get(row.get("key") or "")
            if budget is None or period_of(budget, row["time"]) != period_of(budget, now):
                continue
            bucket = f"{row['key']}:{period_of(budget, now)[0]}"
            tokens = (row.get("prompt_tokens") or 0) + (row.get("completion_tokens") or 0)
            _add(totals, f"{bucket}:tokens", tokens or row.get("reserved_tokens") or 0)
            _add(totals, f"{bucket}:usd", to_units(row.get("usd") or 0.0))
    return totals


def _add(totals: dict[str, int], bucket: str, amount: int) -> None:
    totals[bucket] = totals.get(bucket, 0) + amount


def _rows(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            row = decode(line)
        except DecodeError:  # the last line of a gateway that was killed
            continue
        if isinstance(row, dict) and isinstance(row.get("time"), int | float):
            yield row
