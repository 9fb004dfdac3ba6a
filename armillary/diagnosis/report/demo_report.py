"""The record of a demo run, from measuring to measuring again, from which the report page is made."""

from dataclasses import dataclass
from pathlib import Path

from armillary.diagnosis.outcome.compare import Comparison
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.outcome.prediction_errors import Predicted, predicted_of
from armillary.diagnosis.readings.reading import Reading
from armillary.profiling.profile import Profile
from armillary.serving.load.run import LoadReport
from armillary.spec.arithmetic.params import kv_bytes_per_token
from armillary.spec.plan import Plan
from armillary.spec.tables.traffic import Traffic
from armillary.store.gauges import Record


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the demo (measure, plan, train …), with its result in a line."""

    name: str
    seconds: float
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server under load, from its own side and from its clients'."""

    reading: Reading
    load: LoadReport
    peak_bytes: float | None = None  # most memory that the engine's process had; None where the system does not say


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service of several replicas under load, while another release was promoted."""

    replicas: tuple[tuple[str, int], ...]
    """name and requests of each"""
    releases: tuple[str, str]
    """before and after the promotion"""
    promoted_s: float
    """from the promotion until every replica served the new release"""
    added_p50_s: float | None
    """time in the gateway until a request is sent on"""
    added_p99_s: float | None
    load: LoadReport


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """What a demo predicted, measured, diagnosed and changed; an interrupted one has less of it."""

    title: str  # model and machine
    created: str  # UTC
    stages: tuple[Stage, ...] = ()
    records: tuple[Record, ...] = ()  # every step of the training run, as gauges.jsonl has it
    stops: tuple[int, ...] = ()  # steps after which training was interrupted
    training: Reading | None = None
    profile: Profile | None = None  # one step of training against the measured ceilings
    served: Served | None = None  # the server as the recipe sets it
    served_after: Served | None = None  # the same with a lever applied
    diagnoses: tuple[Diagnosis, ...] = ()  # of the training run and of the server
    pulled: tuple[Comparison, ...] = ()  # levers that were pulled, with what they brought
    service: Service | None = None
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> tuple[Predicted, ...]:
        """Every predicted figure, beside its measurement."""
        rows: tuple[Predicted, ...] = ()
        if self.training is not None:
            rows += predicted_of(self.training, "training", _of_run(self.records))
        for of, item in (("serving", self.served), ("serving, lever applied", self.served_after)):
            if item is not None:
                rows += predicted_of(
                    item.reading, of, _of_server(item.reading, item.peak_bytes) | _of_clients(item.load)
                )
        return rows + tuple(
            Predicted(
                of=f"lever: {item.title}",
                gauge=item.of,
                predicted=item.predicted,
                measured=item.obtained,
                is_speedup=True,
            )
            for item in self.pulled
            if item.predicted is not None
        )


def _of_run(records: tuple[Record, ...]) -> dict[str, float]:
    """From the first step to the last, interruptions included."""
    timed = [record for record in records if "time" in record]
    if len(timed) < 2:
        return {}
    return {"run_s": float(timed[-1]["time"]) - float(timed[0]["time"]) + float(timed[0].get("step_s", 0.0))}


def _of_server(reading: Reading, peak: float | None) -> dict[str, float]:
    """What one server was: its memory apart, and the requests that its cache would have held."""
    plan, tokens = reading.plan, reading.get("kv_capacity_tokens")
    if plan is None or plan.serve is None:
        return {}
    gauges = {"replicas": 1.0, "devices": float(plan.layout.tp)}
    files = list(Path(plan.weights).glob("*.safetensors")) if plan.weights else []
    if files:
        gauges["memory_weights_bytes"] = float(sum(path.stat().st_size for path in files)) / plan.layout.tp
    if tokens:
        wide = 4 if plan.layout.precision == "fp32" else 2
        gauges["memory_kv_bytes"] = tokens * kv_bytes_per_token(plan.model, wide) / plan.layout.tp
        gauges["concurrency"] = float(tokens // _blocks_of_a_request(plan))
    if peak is not None and files and tokens:
        other = peak - gauges["memory_weights_bytes"] - gauges["memory_kv_bytes"]
        gauges |= {"memory_peak_bytes": peak, "memory_other_bytes": max(0.0, other)}
    return gauges


def _blocks_of_a_request(plan: Plan) -> int:
    """Tokens of the whole blocks that a request of the recipe's traffic takes."""
    assert plan.serve is not None
    traffic, block = plan.recipe.get("traffic") or {}, plan.serve.block_tokens
    usual = Traffic()
    length = int(traffic.get("tokens_in", usual.tokens_in)) + int(traffic.get("tokens_out", usual.tokens_out))
    return -(-length // block) * block


def _of_clients(report: LoadReport) -> dict[str, float]:
    """What a plan for serving predicts, as the clients measured it."""
    last = report.last
    spreads = {"ttft": last.ttft, "itl": last.itl, "tpot": last.tpot, "e2e": last.e2e}
    gauges = {
        f"{name}_p{percent}_s": getattr(spread, f"p{percent}_s")
        for name, spread in spreads.items()
        for percent in (50, 90, 99)
        if spread.count
    }
    return gauges | {
        "requests_per_s": last.requests_per_s,
        "tokens_in_per_s": last.tokens_in_per_s,
        "tokens_out_per_s": last.tokens_out_per_s,
    }
