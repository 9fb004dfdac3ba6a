"""Prediction errors: every figure that a plan predicted, beside its measurement.

What cannot be measured here stays in the list, with the reason in place of a figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.diagnosis.evidence.finding import value_text
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.gauges import GAUGES

SMALL_S = 1e-4
"""a predicted time below this is nothing: a share of it says nothing about the plan"""
_CATEGORIES = tuple(
    f"memory_{name}_bytes" for name in ("weights", "gradients", "optimizer", "master", "activations", "loss", "buffers")
)
_WHY = {
    "model_flops_per_token": "a count by definition",
    "step_usd": "what is charged is not measured here",
    "run_usd": "what is charged is not measured here",
    "million_trained_tokens_usd": "what is charged is not measured here",
    "million_tokens_usd": "what is charged is not measured here",
}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One figure that was predicted."""

    of: str  # what was predicted: training, serving, a lever
    gauge: str
    predicted: float
    measured: float | None = None
    why: str = ""  # why it was not measured
    is_speedup: bool = False  # whether both figures are speed-ups in this gauge rather than the gauge itself

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; none where there is nothing to divide by."""
        if self.measured is None or not self.measured:
            return 0.0 if self.measured == self.predicted else None
        return self.predicted / self.measured - 1

    def cells(self) -> list[str]:
        """As a table shows it: of, gauge, predicted, measured, error."""
        name = f"speed-up of {self.gauge}" if self.is_speedup else self.gauge
        measured = self._text(self.measured) if self.measured is not None else self.why or "not measured"
        return [self.of, name, self._text(self.predicted), measured, self._error_text()]

    def _text(self, value: float) -> str:
        return f"{value:.2f} ×" if self.is_speedup else value_text(self.gauge, value)

    def _error_text(self) -> str:
        is_time = GAUGES[self.gauge].unit == "s" and not self.is_speedup
        small = is_time and max(self.predicted, self.measured or 0.0) < SMALL_S
        if self.error is None or self.measured is None or small:
            return "–"
        return "exact" if abs(self.error) < 5e-5 else f"{100 * self.error:+.1f} %".replace("-", "−")


HEADS = ("of", "gauge", "predicted", "measured", "error")


def predicted_of(reading: Reading, of: str, seen: Mapping[str, float] | None = None) -> tuple[Predicted, ...]:
    """Everything the reading's plan predicted; `seen` are figures measured elsewhere, as by the clients of a server,
    and win over the reading's own."""
    plan = reading.plan
    if plan is None:
        return ()
    known = _derived(reading) | dict(seen or {})
    rows = []
    for gauge, value in plan.predicted.items():
        measured = known[gauge] if gauge in known else reading.get(gauge)
        rows.append(Predicted(of=of, gauge=gauge, predicted=value, measured=measured, why=_WHY.get(gauge, "")))
    return tuple(rows)


def _derived(reading: Reading) -> dict[str, float]:
    """Shares of the peak that the plan divided by, at the measured step; and what a peak holds beyond the categories
    that were told apart, of which one that was not seen is none."""
    derived: dict[str, float] = {}
    peak, parts = reading.get("memory_peak_bytes"), {name: reading.get(name) for name in _CATEGORIES}
    if reading.kind == "training" and peak is not None and parts["memory_weights_bytes"] is not None:
        derived = {name: value or 0.0 for name, value in parts.items()}
        derived["memory_other_bytes"] = max(0.0, peak - sum(derived.values()))
    derived |= _counted(reading)
    if reading.plan is not None and reading.plan.train is not None and reading.plan.layout.pp == 1:
        derived["bubble_s"] = 0.0  # there is no pipeline to stand still
    step, planned = reading.get("step_s"), reading.predicted("step_s")
    for name in ("mfu", "hfu"):
        share = reading.predicted(name)
        if reading.get(name) is None and share and step and planned:
            derived[name] = share * planned / step
    return derived


def _counted(reading: Reading) -> dict[str, float]:
    """Tokens and micro-batches of a step, from how the count of tokens grew."""
    grown = [
        (float(record["step"]), float(record["tokens_total"])) for record in reading.steps if "tokens_total" in record
    ]
    plan = reading.plan
    if len(grown) < 2 or plan is None or plan.train is None or grown[-1][0] <= grown[0][0]:
        return {}
    tokens = (grown[-1][1] - grown[0][1]) / (grown[-1][0] - grown[0][0])
    rows = plan.train.sequence * plan.layout.micro_batch * plan.layout.dp
    return {"batch_tokens": tokens, "micro_batches": tokens / rows}
