"""Predictions for a table of published inference measurements, with their errors.

The error of a row is predicted / measured − 1 of its first published figure among tokens/s, inter-token latency and
time to first token; the other figures are predicted too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from armillary.errors import ArmillaryError
from armillary.planning.published.inference_row import InferenceRow, config_id, inference_row, positive
from armillary.planning.published.row_case import Row, is_fitted_on
from armillary.planning.published.throughput_benchmark import MaxLoad, captured_sizes
from armillary.planning.serving.engines import physics
from armillary.planning.serving.generation import (
    Generation,
    mean_decode_s,
    offline,
    prefill_share_s,
    static_batch,
    steady_state,
)
from armillary.planning.serving.serving_memory import concurrency, serving_memory
from armillary.spec.tables.serve import Serve

MEASURES = {
    "tokens_out_per_s": ("measured_tokens_per_s", 1.0),
    "itl_s": ("measured_itl_ms", 1e-3),
    "ttft_s": ("measured_ttft_ms", 1e-3),
}
"""gauge -> (column, unit); the error of a row is that of its first"""
REQUIRED = frozenset({"model", "gpu", "engine", "input_len", "concurrency_or_batch"})
"""columns that identify an inference table"""


@dataclass(frozen=True, kw_only=True)
class InferencePrediction:
    """One row, predicted or not."""

    row: Row
    config_id: str
    fitted: bool
    """whether the engine's parameters may have been fitted on it"""
    kind: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    physics: Mapping[str, float] = field(default_factory=dict)
    """predicted without fitted parameters"""
    measured: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def framework(self) -> str:
        """The engine without its release: 'TensorRT-LLM', 'gpt-fast', 'vLLM'."""
        words = (self.row.get("engine") or "unknown").split()
        return words[0] if len(words) < 2 or words[0] != "Transformers" else " ".join(words[:2])

    @property
    def gauge(self) -> str:
        """The figure of the error."""
        return next((name for name in MEASURES if name in self.measured and name in self.predicted), "")

    @property
    def error(self) -> float | None:
        """predicted / measured − 1."""
        return self.predicted[self.gauge] / self.measured[self.gauge] - 1 if self.gauge else None

    @property
    def physics_error(self) -> float | None:
        return self.physics[self.gauge] / self.measured[self.gauge] - 1 if self.gauge else None


def error_of(row: Row, config: InferenceRow) -> float | None:
    """The error of one configuration, with its current rates."""
    predicted = predict(config)
    return InferencePrediction(row=row, config_id="", fitted=False, measured=_measured(row), predicted=predicted).error


def is_inference_table(columns: Iterable[str]) -> bool:
    return set(columns) >= REQUIRED


def predict_rows(rows: Iterable[Row], *, physics_only: bool = False) -> list[InferencePrediction]:
    """Every row predicted, or with the reason why it cannot be."""
    return [predict_row(row, physics_only=physics_only) for row in rows]


def predict_row(row: Row, *, physics_only: bool = False) -> InferencePrediction:
    """One row; `physics_only` leaves out every fitted parameter."""
    result = InferencePrediction(
        row=row, config_id=config_id(row), fitted=is_fitted_on(config_id(row)), measured=_measured(row)
    )
    if not result.measured:
        return replace(result, reason="nothing measured")
    try:
        return _priced(result, inference_row(row, physics_only=physics_only))
    except ArmillaryError as error:
        return replace(result, reason=str(error))


def _priced(result: InferencePrediction, config: InferenceRow) -> InferencePrediction:
    predicted, unfitted = predict(config), replace(config, replica=replace(config.replica, rates=physics()))
    plain = predicted if config.replica.rates == physics() else predict(unfitted)
    return replace(result, kind=config.kind, predicted=predicted, physics=plain)


def predict(config: InferenceRow) -> dict[str, float]:
    """Gauges of one configuration."""
    replica = config.replica
    if config.kind == "first token":
        return {"ttft_s": replica.prefill(config.tokens_in, max(1, config.batch)).total_s}
    if config.kind == "prefill only":
        return {"tokens_out_per_s": config.tokens_in / prefill_share_s(replica, config.tokens_in, 16384)}
    generation = _generation(config)
    return {name: getattr(generation, name) for name in MEASURES}


def _generation(config: InferenceRow) -> Generation:
    lengths = (config.tokens_in, config.tokens_out)
    if config.kind == "decode only":
        gap = mean_decode_s(config.replica, config.batch, *lengths)
        return Generation(ttft_s=gap, itl_s=gap, total_s=config.tokens_out * gap, tokens_out_per_s=config.batch / gap)
    if config.kind in ("static batch", "batch 1"):
        return static_batch(config.replica, config.batch, *lengths)
    if config.load is not None:
        running = _most_together(config, config.load)
        captured = captured_sizes(running, config.replica.split.pp) if config.load.pads else ()
        return offline(config.replica, config.load.requests, running, *lengths, captured, chunk=config.load.chunk)
    return steady_state(config.replica, config.batch, *lengths)


def _most_together(config: InferenceRow, load: MaxLoad) -> int:
    """Concurrent requests: what the KV cache holds at full length, and the engine's limit per rank. Logits are kept for
    as many as run, not for the limit."""
    most, ranks = load.most_running, config.replica.split.ep
    for _ in range(2):  # the second time with the logits of those that fit
        serve = Serve(max_tokens_per_step=load.chunk, max_running=most)
        memory = serving_memory(config.replica, serve, usable=load.usable)
        fitting = concurrency(config.replica, memory, config.tokens_in + config.tokens_out)
        most = max(1, min(load.most_running, -(-fitting // ranks)))
    return max(1, min(load.most_running * ranks, fitting))


def _measured(row: Row) -> dict[str, float]:
    cells = {name: (positive(row, column), unit) for name, (column, unit) in MEASURES.items()}
    return {name: value * unit for name, (value, unit) in cells.items() if value is not None}
