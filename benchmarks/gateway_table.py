"""The figures of benchmarks/gateway.py as one table: each gateway beside the target of ours, and whether it is met.

python benchmarks/gateway_table.py RESULTS.json
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from armillary.machine.device_name import cpu_name

Results = Mapping[str, Mapping[str, float]]
ROWS: tuple[tuple[str, str, str, float], ...] = (
    ("added latency at 200 requests/s, p50", "added_p50_ms", "ms", 1.0),
    ("the same, p99", "added_p99_ms", "ms", 5.0),
    ("of those requests, answered", "answered", "%", 0.0),
    ("requests/s at saturation", "requests_per_s", "", 0.0),
    ("CPU time per request", "cpu_us_per_request", "µs", 0.0),
    ("300 streams, a chunk every 50 ms: added gap p99", "300_streams_added_gap_p99_ms", "ms", 10.0),
    ("completed", "300_streams_completed", "%", 0.0),
    ("2,000 open streams, a chunk per second: memory", "2000_streams_memory_mb", "MB", 250.0),
    ("completed", "2000_streams_completed", "%", 0.0),
    ("generator's own lag, p99: requests", "generator_lag_p99_ms", "ms", 0.0),
    ("the same: 300 streams", "300_streams_generator_lag_p99_ms", "ms", 0.0),
    ("the same: 2,000 streams", "2000_streams_generator_lag_p99_ms", "ms", 0.0),
    ("memory in the first third of the soak (median)", "soak_first_mb", "MB", 0.0),
    ("memory in its last third", "soak_last_mb", "MB", 0.0),
)
"""what it says, the figure, its unit, and the most that ours may have (0: no target)"""
RATIO = 25.0
"""of our requests/s to LiteLLM's, at least"""


def table(results: Results) -> str:
    """Markdown."""
    kinds = [kind for kind in ("ours", "nginx", "litellm") if kind in results]
    lines = ["| | " + " | ".join(kinds) + " | target for ours |", "|---" * (len(kinds) + 2) + "|"]
    for text, key, unit, most in ROWS:
        if any(key in results[kind] for kind in kinds):
            cells = [_cell(results[kind].get(key, math.nan), unit) for kind in kinds]
            lines.append(f"| {text} | " + " | ".join(cells) + f" | {_verdict(results, key, unit, most)} |")
    if {"ours", "litellm"} <= set(kinds):
        ratio = results["ours"]["requests_per_s"] / results["litellm"]["requests_per_s"]
        blank = " |" * (len(kinds) - 1)
        lines.append(f"| requests/s over LiteLLM's | {ratio:.0f} × |{blank} {RATIO:.0f} ×: {_met(ratio >= RATIO)} |")
    return "\n".join([f"{cpu_name()}, {os.cpu_count()} cores", "", *lines])


def _cell(value: float, unit: str) -> str:
    if math.isnan(value):
        return "none"
    return f"{100 * value:.0f} %" if unit == "%" else f"{value:,.{0 if abs(value) >= 100 else 2}f} {unit}".rstrip()


def _verdict(results: Results, key: str, unit: str, most: float) -> str:
    if not most or "ours" not in results:
        return ""
    return f"{most:g} {unit}: {_met(results['ours'][key] <= most)}"


def _met(holds: bool) -> str:
    return "met" if holds else "**not met**"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
