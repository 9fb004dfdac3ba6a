"""What the audit log adds up to: a JSON line per request, without prompt or completion text and without keys."""

from __future__ import annotations

from pathlib import Path

from msgspec import DecodeError
from msgspec.json import decode

from armillary.errors import NotFound

_TOTALS = ("requests", "errors", "prompt_tokens", "completion_tokens", "usd")


def usage_by_client(path: Path, since: float = 0.0) -> dict[tuple[str, str], dict[str, float]]:
    """(client, model) -> requests, errors, tokens and dollars, of the lines since a time (unix seconds)."""
    totals: dict[tuple[str, str], dict[str, float]] = {}
    if not path.is_file():
        raise NotFound(f"no audit log {path}; run armillary gateway first")
    with path.open("rb") as file:
        for line in file:
            try:
                row = decode(line)
            except DecodeError:  # the last line of a gateway that was killed
                continue
            if row["time"] < since:
                continue
            client, model = row.get("client") or "", row.get("answered_by") or row.get("model") or ""
            total = totals.setdefault((client, model), dict.fromkeys(_TOTALS, 0))
            total["requests"] += 1
            total["errors"] += row["status"] >= 400
            for name in ("prompt_tokens", "completion_tokens", "usd"):
                total[name] += row.get(name) or 0
    return totals
