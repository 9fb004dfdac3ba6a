"""Runs of one job at several sizes as text: a table, and where the speed per device drops."""

from __future__ import annotations

from collections.abc import Sequence

from armillary.cli.output import Output
from armillary.store.home import Home

SHOWN_PART = 0.005
"""share below which a part of the time is left out"""


def say_run_sizes(out: Output, home: Home, targets: Sequence[str]) -> None:
    """A table of the sizes, and where the speed per device drops."""
    from armillary.diagnosis.outcome.run_sizes import PARTS, compare_sizes
    from armillary.diagnosis.readings.open_reading import open_reading

    result = compare_sizes([open_reading(target, home) for target in targets])
    first = result.runs[0].tokens_per_s_per_device
    rows = []
    for run in result.runs:
        total = sum(run.seconds_per_token.values())
        lost = {name: each / total for name, each in run.seconds_per_token.items() if name != "work"}
        most = max(lost, key=lambda name: lost[name])
        waits = f"{PARTS[most]} {lost[most]:.0%}" if lost[most] >= SHOWN_PART else None
        speed = run.tokens_per_s_per_device
        rows.append([run.source, str(run.devices), f"{speed:,.0f}", f"{speed / first:.0%}", waits])
    out.table("", ["run", "devices", "tokens/s per device", "of the smallest", "most beside the work"], rows)
    out.say(result.says)
    part = f"{result.boundary.after.devices} {result.boundary.part}" if result.boundary else "none"
    out.result(result, quiet=part)
