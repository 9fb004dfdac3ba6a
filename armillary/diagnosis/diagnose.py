"""Diagnose: every rule asked, its levers priced, and the verdict: which loop limits, what in it, what each lever buys.

The cause with the largest share among those that a lever can do something about names the loop; where no lever buys
anything worth having, the run is healthy and the verdict says how much is left.
"""

from __future__ import annotations

import time
from dataclasses import replace

from armillary.diagnosis.evidence.finding import Finding, Lever
from armillary.diagnosis.evidence.serving_run import Service
from armillary.diagnosis.evidence.step_parts import parts_of
from armillary.diagnosis.evidence.thresholds import WORTH, Rule
from armillary.diagnosis.levers import advice as their_levers
from armillary.diagnosis.levers import serving as serving_levers
from armillary.diagnosis.levers import training as training_levers
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import is_disturbed
from armillary.diagnosis.rules import device as inner_rules
from armillary.diagnosis.rules import logs as log_rules
from armillary.diagnosis.rules import metrics_page as page_rules
from armillary.diagnosis.rules import serving as product_rules
from armillary.diagnosis.rules import training as training_rules
from armillary.profiling.profile import BUDGET
from armillary.spec.gauges import budget_gauge
from armillary.store.home import Home

STANDS_BY_LEVER = ("needless_recompute", "needless_offload", "precision")
"""causes that are none where no lever acts on them: it was needed after all"""
GENERAL = ("compute", "memory_bandwidth")
"""causes that only say what the time is: any other that explains a lever goes before"""
HEAVY = 0.25
"""share from which a cause is named though no lever is known against it"""
FEWEST = 4
"""steps or requests that must have been timed before a run is called healthy"""
GENERAL_WORTH = {"gpu": 1.3, "cpu": 1.4}
"""predicted speed-up from which kernels that are merely the time are said to limit a training run. A processor runs
operator by operator, so compiling is always worth something there: a run that is well set otherwise is told so, and is
not ill for want of it"""
PRICED_SHARE = (*GENERAL, *STANDS_BY_LEVER)
"""causes whose share is what their best lever would take away, where that is more than was seen"""
NEARLY = 0.2
"""how far parts that were recorded whole may be from 1: each is a median over several recorded steps"""
LOOPS = {"inner": "inner loop", "training": "training loop", "product": "product loop"}


def rules_for(reading: Reading) -> tuple[Rule, ...]:
    """The rules that are asked of this kind of reading."""
    if reading.kind != "serving":
        return (*inner_rules.RULES, *training_rules.RULES, *log_rules.RULES)
    return product_rules.RULES if reading.steps else page_rules.RULES


def diagnose(reading: Reading, home: Home) -> Diagnosis:
    """The verdict on one reading."""
    found = [finding for rule in rules_for(reading) if (finding := rule(reading, reading.plan)) is not None]
    levered = [replace(one, levers=one.levers or _levers(one, reading, home)) for one in found]
    priced = serving_levers.settled([_priced(finding, reading) for finding in _each_once(levered)])
    kept = [finding for finding in priced if finding.cause not in STANDS_BY_LEVER or is_worth(finding, reading)]
    kept.sort(key=lambda finding: _order(finding, reading))
    limiting = kept[0] if kept and limits(kept[0], reading) else None
    levers = _ranked(kept, limiting)
    gain = _gain(levers, limiting)
    judged = limiting is not None or is_enough(reading)
    return Diagnosis(
        source=reading.source,
        kind=reading.kind,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        loop=limiting.loop if limiting else None,
        cause=limiting.cause if limiting else None,
        headline=_headline(limiting, kept, gain) if judged else f"cannot be judged: {_lacks(reading)}",
        judged=judged,
        gain=gain,
        budget=budget_of(reading),
        findings=tuple(kept),
        levers=levers,
        notes=reading.notes,
    )


def limits(finding: Finding, reading: Reading) -> bool:
    """Whether a cause may name the loop: a lever acts on it, or it costs so much that it must be said all the same."""
    heavy = finding.share >= HEAVY and finding.cause not in (*GENERAL, *STANDS_BY_LEVER)
    return heavy or is_worth(finding, reading)


def _order(finding: Finding, reading: Reading) -> tuple[bool, bool, float]:
    """What limits first. Causes of a server overlap, and the one that a lever acts on is told before the others; of a
    training run that was planned, what was chosen wrongly before what its kernels could do better."""
    unpriced = reading.kind == "serving" and not is_worth(finding, reading)
    return not limits(finding, reading), unpriced or _is_general(finding, reading), -finding.share


def _is_general(finding: Finding, reading: Reading) -> bool:
    """Whether a planned training run merely computes; on a processor, where every operator is a call, calls are a part
    of that unless they are a good deal of the time."""
    if reading.kind != "training" or reading.plan is None:
        return False
    calls = finding.cause == "launch_overhead" and reading.plan.cluster.chip.kind == "cpu" and finding.share < HEAVY
    return calls or finding.cause in GENERAL


def is_enough(reading: Reading) -> bool:
    """Whether there is anything to judge: steps or requests that were timed, a page with traffic, a recorded budget."""
    timed = len(reading.series("step_s")) or len(reading.series("engine_step_s")) or len(reading.requests)
    told = any(name in reading.values for name in ("useful_fraction", "step_s", "e2e_s", "ttft_s", "e2e_p50_s"))
    return timed >= FEWEST or told


def _lacks(reading: Reading) -> str:
    what = "requests" if reading.kind == "serving" else "steps"
    return f"{reading.source} has measured too few {what}; let it run on"


def _gain(levers: tuple[Lever, ...], limiting: Finding | None) -> float:
    """What the best lever adds to the gauge that limits, or to the speed where none does."""
    of = limiting.levers[0].of if limiting and limiting.levers else "step_s"
    same = [lever.speedup for lever in levers if lever.of == of] or [lever.speedup for lever in levers]
    return max(0.0, max(same, default=1.0) - 1)


def is_worth(finding: Finding, reading: Reading) -> bool:
    """Whether any lever against it buys something; a run that merely computes is held back by its kernels only where
    that is a good deal, and otherwise is told what is left."""
    chip = "cpu" if reading.plan is not None and reading.plan.cluster.chip.kind == "cpu" else "gpu"
    general = finding.cause in GENERAL and reading.kind == "training"
    if general and is_disturbed(reading):  # kernels that wait for a core look slow
        return False
    enough = GENERAL_WORTH[chip] if general else WORTH
    return any(lever.speedup > enough for lever in finding.levers)


def _priced(finding: Finding, reading: Reading) -> Finding:
    """With the share that its levers tell, where only they do."""
    served = max((lever.speedup for lever in finding.levers if lever.of == "tokens_out_per_s"), default=0.0)
    if served and Service(reading, reading.plan).batch_job:  # played again: all its causes are measured by one rate
        return replace(finding, share=max(0.0, 1 - 1 / served))
    best = max((lever.speedup for lever in finding.levers if lever.of == "step_s"), default=1.0)
    share = max(finding.share, 1 - 1 / best) if finding.cause in PRICED_SHARE else finding.share
    return replace(finding, share=share)


def _each_once(findings: list[Finding]) -> list[Finding]:
    """A lever belongs to the cause it acts on; kernels that are merely the time come last."""
    causes = {lever.sets for one in findings if one.cause not in GENERAL for lever in one.levers if lever.sets}
    return [
        replace(one, levers=tuple(lever for lever in one.levers if lever.sets not in causes))
        if one.cause in GENERAL
        else one
        for one in findings
    ]


def _levers(finding: Finding, reading: Reading, home: Home) -> tuple[Lever, ...]:
    if reading.plan is None and reading.kind != "serving":
        return their_levers.levers_for(finding, reading)
    price = serving_levers.levers_for if reading.kind == "serving" else training_levers.levers_for
    return price(finding, reading, home)


def _ranked(findings: list[Finding], limiting: Finding | None) -> tuple[Lever, ...]:
    """The best lever of what limits first, then all others by what they buy; each once."""
    first = limiting.levers[0] if limiting and limiting.levers else None
    of = first.of if first else "step_s"
    rest = [lever for one in findings for lever in one.levers]
    rest.sort(key=lambda lever: (lever.of != of, -lever.speedup))
    seen: dict[str, Lever] = {}
    for lever in ([first] if first else []) + rest:
        seen.setdefault(lever.sets or lever.title, lever)
    return tuple(seen.values())


def _headline(limiting: Finding | None, findings: list[Finding], gain: float) -> str:
    if limiting is not None:
        return f"{LOOPS[limiting.loop]} limits this run · {limiting.says}"
    state = next((one.says for one in findings if one.cause in ("compute", "memory_bandwidth")), "")
    left = f"nothing to gain beyond {max(0.0, gain):.0%}"
    return f"healthy: {left} · {state}" if state else f"healthy: {left}"


def budget_of(reading: Reading) -> dict[str, float]:
    """Where the time went, as shares of all of it; empty where nothing was recorded."""
    parts = parts_of(reading)
    inside = {part: share for part in BUDGET if (share := reading.get(budget_gauge(part))) is not None}
    whole = sum(inside.values())
    if abs(whole - 1) < NEARLY:
        inside = {part: share / whole for part, share in inside.items()}
    if parts is None:
        return inside
    stood = parts.share(parts.step - parts.data_wait)
    beside = {
        "data_wait": parts.data_wait,
        "checkpoints": parts.checkpoint,
        "validation": parts.validation,
        "between_steps": parts.between,
    }
    return {part: share * stood for part, share in inside.items()} | {
        name: parts.share(seconds) for name, seconds in beside.items()
    }
