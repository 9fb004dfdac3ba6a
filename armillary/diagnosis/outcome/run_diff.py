"""Differences of two runs other than a lever: keys of the recipe, the machine, the requests.

A lever is credited with an outcome only where nothing else differs.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from armillary.diagnosis.evidence.finding import overrides_of
from armillary.diagnosis.readings.reading import Kind, Reading
from armillary.diagnosis.readings.run_folder import FEWEST
from armillary.errors import BadInput
from armillary.spec.recipe import flat, recipe_from_dict
from armillary.store.gauges import Record
from armillary.store.runs import Run

NEITHER = ("traffic", "objective", "predict", "load", "cost")
"""tables that change neither training nor an engine; requests are compared as they came, not as they were planned"""
UNREAD: Mapping[Kind, tuple[str, ...]] = {"training": (*NEITHER, "serve"), "serving": (*NEITHER, "train", "data")}
SAME_STEP = tuple(
    f"train.{name}"
    for name in (
        "steps",
        "lr",
        "lr_base_batch",
        "min_lr",
        "warmup_steps",
        "schedule",
        "decay_fraction",
        "weight_decay",
        "betas",
        "eps",
        "seed",
        "profile_every",
    )
)
"""keys that leave the time of a step as it is; recorded steps are not timed"""
TOLD = ("serve.dtype", "serve.name", "serve.tools", "serve.api_key_file", "serve.otlp")
"""keys of a server that change no figure by themselves: the dtype that a server uses is in layout.precision"""
ALIKE, STRAY = 0.15, 2
"""how far two loads may differ, as a share or in requests: arrivals are random, and a server gets stray requests"""


def changes(a: Run, b: Run) -> dict[str, Any]:
    """Keys whose values differ, with b's value."""
    changed = differing(flat(recipe_from_dict(a.recipe)), flat(recipe_from_dict(b.recipe)))
    return {key: value for key, value in changed.items() if key not in TOLD}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose values differ, with the value after; none where there is none any more."""
    keys = dict.fromkeys([*before, *after])
    return {key: after.get(key) for key in keys if before.get(key) != after.get(key)}


def other_keys(a: Run, b: Run, lever: Mapping[str, Any], kind: Kind) -> tuple[str, ...] | None:
    """Keys that differ beside a lever's and may matter; none at all (None) where b does not have the lever pulled."""
    try:
        wanted = flat(recipe_from_dict(a.recipe, overrides_of(lever)))
    except BadInput:
        return None
    pulled = differing(flat(recipe_from_dict(a.recipe)), wanted)
    rest = differing(wanted, flat(recipe_from_dict(b.recipe)))
    if not pulled or any(key in rest for key in pulled):
        return None
    return tuple(key for key in rest if matters(key, kind))


def matters(key: str, kind: Kind) -> bool:
    """Whether a key can change what is measured in a run of this kind."""
    return key.partition(".")[0] not in UNREAD.get(kind, ()) and key not in (*SAME_STEP, *TOLD)


def other_conditions(a: Reading, b: Reading) -> list[str]:
    """Differences outside the recipe that change figures, one phrase each."""
    phrases = [f"{reading.source} took only {count} steps" for reading in (a, b) if (count := _steps(reading)) < FEWEST]
    chips = [reading.plan.cluster.chip.name for reading in (a, b) if reading.plan is not None]
    if len(set(chips)) > 1:
        phrases.append(f"one ran on {chips[0]} and the other on {chips[1]}")
    if a.kind == "serving" and not same_requests(a.requests, b.requests):
        phrases.append(f"other requests came: {_load_text(a.requests)} against {_load_text(b.requests)}")
    return phrases


def _steps(reading: Reading) -> int:
    gauge = "engine_step_s" if reading.kind == "serving" else "step_s"
    return sum(gauge in record for record in reading.steps)


# --- requests


def same_requests(a: Sequence[Record], b: Sequence[Record]) -> bool:
    """Whether lengths are alike, and the number of requests or their rate is: a closed-loop client sends more per
    second to a faster server, and a longer test sends more in all."""
    lengths = all(_alike(_typical(a, name), _typical(b, name)) for name in ("tokens_in", "tokens_out"))
    rates = [_rate(a), _rate(b)]
    return lengths and (_alike(len(a), len(b), STRAY) or (all(rates) and _alike(*rates)))


def _alike(first: float, second: float, stray: float = 0.0) -> bool:
    return abs(first - second) <= max(stray, ALIKE * max(first, second))


def _typical(requests: Sequence[Record], name: str) -> float:
    """The median, which a single request by hand does not move."""
    return median(float(request.get(name, 0)) for request in requests) if requests else 0.0


def _rate(requests: Sequence[Record]) -> float:
    """Arrivals per second; 0 where all arrived at once or no times were recorded."""
    times = sorted(float(request["arrived_s"]) for request in requests if "arrived_s" in request)
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


def _load_text(requests: Sequence[Record]) -> str:
    return f"{len(requests)} of {_typical(requests, 'tokens_in'):.0f} + {_typical(requests, 'tokens_out'):.0f} tokens"
