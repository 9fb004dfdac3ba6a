"""Replicas and scaling decisions of the services that `armillary up` runs or ran here, from their decision logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from armillary.fleet.autoscale.decision_log import Logged, newest
from armillary.report.charts import lines
from armillary.report.page import scrolling, section
from armillary.store.home import Home
from armillary.units import seconds_text

LOG = "decisions.jsonl"
SHOWN_SERVICES, SHOWN_CHANGES = 4, 10


def scaling_decisions(home: Home) -> str:
    """A section for each of the services whose logs were written last; empty where there is none."""
    logs = sorted((home.work / "services").glob(f"*/{LOG}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return "".join(_service(log) for log in logs[:SHOWN_SERVICES])


def _service(log: Path) -> str:
    read = newest(log)
    if not read:
        return ""
    now, wanted = read[-1].signals, read[-1].decision.replicas
    end, ago_s = now.now, max(0.0, time.time() - log.stat().st_mtime)
    said = f"{now.ready} ready, {now.starting} starting, {wanted} wanted"
    facts = f"<p>{said}; the autoscaler's last look was {seconds_text(ago_s)} ago.</p>"
    return section(f"Service {log.parent.name}", facts + _chart(read, end) + _changes(read, end, ago_s))


def _chart(read: Sequence[Logged], end: float) -> str:
    seconds = [line.signals.now - end for line in read]
    series = [
        ("ready", [(at, float(line.signals.ready)) for at, line in zip(seconds, read, strict=True)]),
        ("wanted", [(at, float(line.decision.replicas)) for at, line in zip(seconds, read, strict=True)]),
    ]
    return lines(series, label="Replicas over time", x_name="seconds before the last look", y_text=lambda x: f"{x:g}")


def _changes(read: Sequence[Logged], end: float, ago_s: float) -> str:
    """The newest decisions that changed the number of replicas, and why."""
    changed = [line.decision for line in read if line.decision.change]
    if not changed:
        return "<p>No scaling decision among the last looks.</p>"
    rows = "".join(
        f"<tr><td>{seconds_text(max(0.0, end - each.now) + ago_s)} ago</td>"
        f"<td>{each.before} → {each.replicas}</td><td>{escape(each.reason)}</td></tr>"
        for each in reversed(changed[-SHOWN_CHANGES:])
    )
    heads = "<tr><th>when</th><th>replicas</th><th>because</th></tr>"
    return f"<h3>Scaling decisions</h3>{scrolling(f'<table>{heads}{rows}</table>')}"
