"""Findings as Prometheus alerting rules: the figures that exceeded what is healthy, as an expression on their metrics.

Figures whose metric the server exports under a name of its own (vLLM, SGLang, TGI) are asked for by that name. Those
that no page has, such as the findings of a log, are left out.
"""

from __future__ import annotations

import json

from armillary.diagnosis.evidence.finding import Evidence, Finding
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.server_metrics import SERVERS
from armillary.errors import BadInput
from armillary.spec.gauges import GAUGES, prometheus_name

FOR = "10m"
"""how long a figure must be beyond its limit, so that a burst wakes nobody"""
_PERCENTILES = ("p50", "p90", "p99")


def alerts(diagnosis: Diagnosis, reading: Reading) -> str:
    """A file for `rule_files` of Prometheus; BadInput where no figure can be asked for."""
    rules = [rule for finding in diagnosis.findings if (rule := _rule(finding, reading))]
    if not rules:
        raise BadInput(
            f"no finding of {diagnosis.source} has a limit and a metric; diagnose a server or a training run"
        )
    lines = ["groups:", "- name: armillary", "  rules:", *(line for rule in rules for line in rule)]
    return "\n".join(lines) + "\n"


def _rule(finding: Finding, reading: Reading) -> list[str]:
    """One alert per finding, while all of its figures are beyond their limits on one server: a cache with space alone
    is no reason to wake anybody, one with space while requests wait is."""
    conditions = [expression for each in finding.evidence if (expression := _expression(each, reading)) is not None]
    if not conditions:
        return []
    return [
        f"  - alert: {_camel(finding.cause)}",
        f"    expr: {json.dumps(' and on (instance) '.join(conditions))}",
        f"    for: {FOR}",
        "    labels:",
        f"      loop: {finding.loop}",
        "    annotations:",
        f"      summary: {json.dumps(finding.says)}",
        f"      description: {json.dumps(_lever_text(finding))}",
    ]


def _expression(evidence: Evidence, reading: Reading) -> str | None:
    """metric > limit, or < where the figure was too small; None without a limit or a metric."""
    metric = _metric(evidence.gauge, reading)
    if metric is None or evidence.expected is None or evidence.value == evidence.expected:
        return None
    return f"{metric} {'>' if evidence.value > evidence.expected else '<'} {evidence.expected:.6g}"


def _metric(gauge: str, reading: Reading) -> str | None:
    """The figure as PromQL: a gauge, or a percentile over a histogram."""
    base, _, percentile = gauge.removesuffix("_s").rpartition("_")
    of_histogram = percentile in _PERCENTILES
    asked = f"{base}_s" if of_histogram else gauge
    known = SERVERS.get(reading.by, SERVERS["armillary"])
    if of_histogram and asked in known.histograms:
        quantile = int(percentile[1:]) / 100
        return (
            f"histogram_quantile({quantile:g}, sum by (le, instance) (rate({known.histograms[asked][0]}_bucket[5m])))"
        )
    if reading.by == "armillary":
        return prometheus_name(gauge) if gauge in GAUGES and GAUGES[gauge].kind == "value" else None
    return known.values[gauge][0] if gauge in known.values else None


def _lever_text(finding: Finding) -> str:
    if not finding.levers:
        return "no lever is known"
    best = finding.levers[0]
    return f"{best.title}: predicted {best.gain_text} {best.sets or best.action}".strip()


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
