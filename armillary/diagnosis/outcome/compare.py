"""Comparison of two runs: what a lever was predicted to gain, and what was obtained.

An outcome is logged only where the lever is all that differs and was predicted before run b began.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from armillary.diagnosis.evidence.finding import Lever, overrides_of
from armillary.diagnosis.evidence.step_parts import parts_of
from armillary.diagnosis.outcome.diagnosis import FILE, read_diagnosis
from armillary.diagnosis.outcome.track_record import LoggedPrediction, log_outcome, read_record
from armillary.diagnosis.readings.reading import Reading, ReadingKind
from armillary.diagnosis.readings.run_folder import FEWEST, read_run
from armillary.errors import BadInput
from armillary.spec.recipe import flat, recipe_from_dict
from armillary.store.gauges import Record
from armillary.store.home import Home
from armillary.store.runs import Run

STEP = "step_s"
SHOWN_KEYS = 6
"""keys named in a sentence"""
NEITHER = ("traffic", "objective", "predict", "load", "cost")
"""tables that change neither training nor an engine; requests are compared as they came, not as they were planned"""
UNREAD: Mapping[ReadingKind, tuple[str, ...]] = {
    "training": (*NEITHER, "serve"),
    "serving": (*NEITHER, "train", "data"),
}
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run b against run a, which came before it."""

    a: str
    b: str
    of: str  # the gauge that is compared
    before: float
    after: float
    obtained: float  # speed-up: above 1 is better
    predicted: float | None = None  # speed-up as predicted before; None where nobody predicted just this change
    title: str = ""  # of the lever
    change: Mapping[str, Any]  # keys of the recipe that differ, as they are in b
    notes: tuple[str, ...] = ()  # why a lever that was pulled is not credited with this

    @property
    def error(self) -> float | None:
        return abs(self.obtained / self.predicted - 1) if self.predicted else None


def compare(a: Run, b: Run, home: Home) -> Comparison:
    """What changed, what it brought, and what was predicted; the outcome of a prediction goes into the record."""
    if a.folder.resolve() == b.folder.resolve():
        raise BadInput(f"run {a.name} cannot be compared with itself; name the run with the lever applied second")
    first, second = read_run(a, home), read_run(b, home)
    if first.kind != second.kind:
        raise BadInput(f"run {a.name} is {first.kind} and run {b.name} is {second.kind}; compare two of a kind")
    credited, notes = _credited(a, b, home, first.kind)
    if credited is not None:
        notes += [
            f"{condition}, so {credited.title} is not held to its {credited.predicted:.2f} ×"
            for condition in other_conditions(first, second)
        ]
    comparison = _measured_both(a, b, first, second, credited)
    if credited is None or notes:
        return replace(comparison, notes=tuple(notes))
    log_outcome(home, replace(credited, obtained=comparison.obtained, by=b.id))
    return replace(comparison, predicted=credited.predicted, title=credited.title)


def _measured_both(a: Run, b: Run, first: Reading, second: Reading, credited: LoggedPrediction | None) -> Comparison:
    of = credited.of if credited else STEP if first.kind == "training" else _latency(first, second)
    before, after = measured(first, of), measured(second, of)
    if not before or not after:
        raise BadInput(f"{of} was not measured in both runs; compare runs that took some steps")
    obtained = after / before if is_rate(of) else before / after
    return Comparison(a=a.id, b=b.id, of=of, before=before, after=after, obtained=obtained, change=changes(a, b))


def measured(reading: Reading, of: str) -> float | None:
    """The value of a gauge; of a step with everything between steps, since levers are priced for that."""
    parts = parts_of(reading) if of == STEP else None
    return parts.total if parts is not None else reading.get(of)


def is_rate(gauge: str) -> bool:
    """Whether more is better."""
    return gauge.endswith("_per_s") or gauge == "goodput_fraction"


def _latency(first: Reading, second: Reading) -> str:
    """The gauge by which two servers are compared where there is no prediction."""
    both = [name for name in ("tokens_out_per_s", "e2e_p50_s", "ttft_p50_s") if first.get(name) and second.get(name)]
    if not both:
        raise BadInput("the two runs have no figure in common; compare runs that answered requests")
    return both[0]


# --- what was predicted


def predictions(run: Run, home: Home) -> list[LoggedPrediction]:
    """Predictions of this run's levers: first the applied ones in their order, then those of its diagnosis."""
    logged = sorted(
        (line for line in read_record(home).lines if line.run == run.id), key=lambda line: line.predicted_at
    )
    if not (run.folder / FILE).is_file():
        return logged
    diagnosis = read_diagnosis(run.folder)
    return logged + [as_prediction(run, lever, at=diagnosis.created_s) for lever in diagnosis.levers if lever.change]


def as_prediction(
    run: Run, lever: Lever, *, at: float, value: float | None = None, recipe: str = ""
) -> LoggedPrediction:
    """A lever as a prediction; `value` is what its gauge is now."""
    expected = None if value is None else value * lever.speedup if is_rate(lever.of) else value / lever.speedup
    return LoggedPrediction(
        run=run.id,
        title=lever.title,
        change=dict(lever.change),
        of=lever.of,
        value=value,
        predicted=lever.speedup,
        expected=expected,
        predicted_at=at,
        recipe=recipe,
    )


def _credited(a: Run, b: Run, home: Home, kind: ReadingKind) -> tuple[LoggedPrediction | None, list[str]]:
    """The first prediction of what differs between the runs, and the reasons not to credit it."""
    pulled = [
        (prediction, differing)
        for prediction in predictions(a, home)
        if (differing := other_keys(a, b, prediction.change, kind)) is not None
    ]
    if not pulled:
        return None, []
    began = b.state.started
    prediction, differing = min(pulled, key=lambda pair: (len(pair[1]), pair[0].predicted_at > began))
    said = f"{prediction.title} was predicted to bring {prediction.predicted:.2f} ×"
    notes = [f"{said}, but more differs than that: {_names(differing)}"] if differing else []
    return prediction, notes + (
        [f"{said} only after run {b.name} had begun"] if prediction.predicted_at > began else []
    )


def _names(keys: Sequence[str]) -> str:
    more = len(keys) - SHOWN_KEYS
    return ", ".join(keys[:SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


# --- what differs besides the lever: keys of the recipe, the machine, the requests


def changes(a: Run, b: Run) -> dict[str, Any]:
    """Keys whose values differ, with b's value."""
    changed = differing(flat(recipe_from_dict(a.recipe)), flat(recipe_from_dict(b.recipe)))
    return {key: value for key, value in changed.items() if key not in TOLD}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose values differ, with the value after; none where there is none any more."""
    keys = dict.fromkeys([*before, *after])
    return {key: after.get(key) for key in keys if before.get(key) != after.get(key)}


def other_keys(a: Run, b: Run, lever: Mapping[str, Any], kind: ReadingKind) -> tuple[str, ...] | None:
    """Keys that differ beside a lever's and may matter; none at all (None) where b does not have the lever applied."""
    try:
        wanted = flat(recipe_from_dict(a.recipe, overrides_of(lever)))
    except BadInput:
        return None
    pulled = differing(flat(recipe_from_dict(a.recipe)), wanted)
    rest = differing(wanted, flat(recipe_from_dict(b.recipe)))
    if not pulled or any(key in rest for key in pulled):
        return None
    return tuple(key for key in rest if matters(key, kind))


def matters(key: str, kind: ReadingKind) -> bool:
    """Whether a key can change what is measured in a run of this kind."""
    return key.partition(".")[0] not in UNREAD.get(kind, ()) and key not in (*SAME_STEP, *TOLD)


def other_conditions(a: Reading, b: Reading) -> list[str]:
    """Differences outside the recipe that change figures, one phrase each."""
    phrases = [f"{reading.source} took only {count} steps" for reading in (a, b) if (count := _steps(reading)) < FEWEST]
    chips = [reading.plan.cluster.chip.name for reading in (a, b) if reading.plan is not None]
    if len(set(chips)) > 1:
        phrases.append(f"one ran on {chips[0]} and the other on {chips[1]}")
    phrases += _other_dtype(a, b)
    if a.kind == "serving" and not same_requests(a.requests, b.requests):
        phrases.append(f"other requests came: {_load_text(a.requests)} against {_load_text(b.requests)}")
    return phrases


def _other_dtype(a: Reading, b: Reading) -> list[str]:
    """Where both recipes leave the dtype open, and ceilings that were measured in between, or a busy machine's probe,
    led to another one."""
    plans = [reading.plan for reading in (a, b) if reading.plan is not None]
    left = all(plan.recipe.get("layout", {}).get("precision", "auto") == "auto" for plan in plans)
    dtypes = [plan.layout.precision for plan in plans]
    return [f"layout.precision=auto took {dtypes[0]} and then {dtypes[-1]}"] if left and len(set(dtypes)) > 1 else []


def _steps(reading: Reading) -> int:
    gauge = "engine_step_s" if reading.kind == "serving" else "step_s"
    return sum(gauge in record for record in reading.steps)


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
