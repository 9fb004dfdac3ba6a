"""Circle: one turn from measuring to measuring again, as a record that the report page is made from."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.diagnosis.compare import Comparison
from armillary.diagnosis.diagnosis import Diagnosis
from armillary.diagnosis.predicted import Predicted, predicted_of
from armillary.diagnosis.reading import Reading
from armillary.profiling.profile import Profile
from armillary.serving.load.run import LoadReport
from armillary.store.gauges import Record


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of the way round."""

    name: str
    """measure, plan, train …"""
    seconds: float
    """how long it took"""
    said: str = ""
    """what came of it, in a line"""


@dataclass(frozen=True, kw_only=True)
class Circle:
    """What one turn predicted, measured, found and changed; a turn that was cut short has less of it."""

    title: str
    """model and machine"""
    created: str
    """when, in UTC"""
    stages: tuple[Stage, ...] = ()
    """in their order"""
    records: tuple[Record, ...] = ()
    """every step of the training run, as gauges.jsonl has it"""
    stops: tuple[int, ...] = ()
    """steps after which training was interrupted"""
    training: Reading | None = None
    """the training run"""
    profile: Profile | None = None
    """one step of it against the measured ceilings"""
    serving: Reading | None = None
    """the server"""
    load: LoadReport | None = None
    """what its clients saw"""
    load_after: LoadReport | None = None
    """the same with a lever pulled"""
    diagnoses: tuple[Diagnosis, ...] = ()
    """of the training run and of the server"""
    pulled: tuple[Comparison, ...] = ()
    """levers that were pulled, with what they brought"""
    notes: tuple[str, ...] = ()
    """what to mind when reading it"""

    @property
    def predicted(self) -> tuple[Predicted, ...]:
        """Every figure that was predicted on the way, beside its measurement."""
        rows: tuple[Predicted, ...] = ()
        if self.training is not None:
            rows += predicted_of(self.training, "training", _of_run(self.records))
        if self.serving is not None:
            rows += predicted_of(self.serving, "serving", _of_clients(self.load) if self.load else {})
        return rows + tuple(
            Predicted(of=f"lever: {one.title}", gauge=one.of, predicted=one.predicted, measured=one.obtained,
                      is_speedup=True)
            for one in self.pulled if one.predicted is not None
        )  # fmt: skip


def _of_run(records: tuple[Record, ...]) -> dict[str, float]:
    """From the first step to the last, interruptions included."""
    timed = [one for one in records if "time" in one]
    if len(timed) < 2:
        return {}
    return {"run_s": float(timed[-1]["time"]) - float(timed[0]["time"]) + float(timed[0].get("step_s", 0.0))}


def _of_clients(report: LoadReport) -> dict[str, float]:
    """What a plan for serving predicts, as the clients measured it."""
    last = report.last
    spreads = {"ttft": last.ttft, "itl": last.itl, "tpot": last.tpot, "e2e": last.e2e}
    found = {f"{name}_p{percent}_s": getattr(spread, f"p{percent}_s")
             for name, spread in spreads.items() for percent in (50, 90, 99) if spread.count}  # fmt: skip
    return found | {"requests_per_s": last.requests_per_s, "tokens_in_per_s": last.tokens_in_per_s,
                    "tokens_out_per_s": last.tokens_out_per_s}  # fmt: skip
