"""A serving run as the rules see it: which requests waited, for what, and what engine steps cost.

After a step with requests still waiting, one bottleneck kept them out: all rows of the batch were taken, the step's
budget of prompt tokens was spent, or KV cache blocks were lacking; with static batching, the batch itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from armillary.diagnosis.evidence.finding import Evidence
from armillary.diagnosis.evidence.thresholds import (
    BATCH_JOB_SPAN_SHARE,
    BUDGET_SPENT_SHARE,
    FIRST_RECORDED_STEP,
    KV_HELD_SHARE,
    QUEUE_CLEARING_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec.plan import Plan
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Objective
from armillary.store.gauges import Record

Bottleneck = Literal["rows", "budget", "blocks", "batch", "unknown"]
OBJECTIVES = ("ttft_p99_s", "itl_p99_s", "tpot_p99_s", "e2e_p99_s")


@dataclass(frozen=True)
class ServingRun:
    """A serving run."""

    reading: Reading
    plan: Plan | None

    @cached_property
    def serve(self) -> Serve:
        """Its settings; the defaults where the plan has none."""
        return self.plan.serve if self.plan is not None and self.plan.serve is not None else Serve()

    @cached_property
    def objective(self) -> Objective:
        given = dict(self.plan.recipe.get("objective") or {}) if self.plan is not None else {}
        return Objective(**{name: given[name] for name in OBJECTIVES if given.get(name) is not None})

    @cached_property
    def missed(self) -> dict[str, float]:
        """Objectives that are not met: gauge -> measured value over the limit, the worst first."""
        ratios = {
            name: value / limit
            for name in OBJECTIVES
            if (limit := getattr(self.objective, name)) and (value := self.reading.get(name) or 0.0) > limit
        }
        return dict(sorted(ratios.items(), key=lambda item: -item[1]))

    # --- time

    @cached_property
    def cost(self) -> StepCost | None:
        """Step time as a linear function of the step's work."""
        return self.reading.step_cost

    @cached_property
    def busy_s(self) -> float:
        """Time in steps."""
        return self._sum("engine_step_s")

    def _sum(self, gauge: str) -> float:
        """Over all recorded steps."""
        return sum(float(step.get(gauge, 0.0)) for step in self.reading.steps)

    @cached_property
    def queue_share(self) -> float:
        """Share of the time from a request's arrival to its last token that it spent in the queue."""
        timed = [request for request in self.reading.requests if "queue_s" in request and "e2e_s" in request]
        total_s = sum(float(request["e2e_s"]) for request in timed)
        return sum(float(request["queue_s"]) for request in timed) / total_s if total_s else 0.0

    @cached_property
    def batch_job(self) -> bool:
        """Whether all requests arrived at once: what counts is when the last one finishes."""
        return self._spans is not None and self._spans[0] <= BATCH_JOB_SPAN_SHARE * self._spans[1]

    @cached_property
    def excess(self) -> float:
        """Share of the work beyond capacity: 1 − time of the arrivals over time until the last request finished."""
        arriving_s, total_s = self._spans or (0.0, 0.0)
        return max(0.0, 1 - arriving_s / total_s) if total_s > 0 else 0.0

    @cached_property
    def _spans(self) -> tuple[float, float] | None:
        """Seconds from the first arrival to the last one, and to the end of the last request; None for fewer than two
        requests."""
        timed = [request for request in self.reading.requests if "arrived_s" in request and "e2e_s" in request]
        if len(timed) < 2:
            return None
        arrivals = [float(request["arrived_s"]) for request in timed]
        end = max(float(request["arrived_s"]) + float(request["e2e_s"]) for request in timed)
        return max(arrivals) - min(arrivals), end - min(arrivals)

    # --- the queue

    @cached_property
    def queued(self) -> Sequence[Record]:
        """Steps after which requests still waited."""
        return [step for step in self.reading.steps if step.get("waiting", 0) > 0 and "running" in step]

    @cached_property
    def queued_share(self) -> float:
        """Share of the time in steps with requests waiting."""
        return sum(map(_seconds, self.queued)) / self.busy_s if self.busy_s else 0.0

    @cached_property
    def bottlenecks(self) -> dict[Bottleneck, float]:
        """What kept waiting requests out: bottleneck -> share of the time in steps, the largest first."""
        shares: dict[Bottleneck, float] = {}
        for step in self.queued:
            bottleneck = self._bottleneck(step)
            shares[bottleneck] = shares.get(bottleneck, 0.0) + _seconds(step) / self.busy_s
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The largest one; none where no request waited."""
        return next(iter(self.bottlenecks), None)

    def _bottleneck(self, step: Record) -> Bottleneck:
        if step["running"] >= self.rows:
            return "rows"
        if self.serve.batching != "continuous":
            return "batch"
        if self._is_full(step) or self.serve.prefill_slowdown is not None:
            return "budget"
        return "blocks" if float(step.get("kv_used_fraction", 1.0)) >= KV_HELD_SHARE else "unknown"

    def _is_full(self, step: Record) -> bool:
        """Whether a step prefilled as many tokens as it may."""
        prompts, decodes = float(step.get("prefill_tokens", 0)), float(step.get("decode_tokens", 0))
        limit = self.serve.max_tokens_per_step - decodes
        if decodes and self.serve.prefill_tokens is not None:
            limit = min(limit, self.serve.prefill_tokens)
        return prompts >= BUDGET_SPENT_SHARE * limit

    @property
    def rows(self) -> int:
        """Requests that may run at once."""
        return 1 if self.serve.batching == "none" else self.serve.max_running

    # --- what more rows would do

    @cached_property
    def decoding(self) -> float:
        """Mean decodes per step that has decodes."""
        return _mean(float(step["decode_tokens"]) for step in self.reading.steps if step.get("decode_tokens"))

    @cached_property
    def wanted(self) -> float:
        """Requests that would run without the bottleneck: running plus waiting, mean over queued steps."""
        return _mean(float(step["running"]) + float(step["waiting"]) for step in self.queued)

    @cached_property
    def context(self) -> float:
        """Mean context length of a decode in tokens."""
        decodes = self._sum("decode_tokens")
        return self._sum("context_tokens") / decodes if decodes else 0.0

    def share_saved(self, rows: float) -> float:
        """Share of the time in steps saved if `rows` requests decoded together instead of `decoding`: a step pays its
        fixed cost once, however many requests are in it."""
        cost, now = self.cost, self.decoding
        if cost is None or not now or rows <= now or not self.busy_s:
            return 0.0
        return min(0.99, self._sum("decode_tokens") * cost.base_s * (1 / now - 1 / rows) / self.busy_s)

    # --- gaps

    def stretched(self, limit_s: float) -> float:
        """Share of decoded tokens whose step was longer than the limit because of its prompts, by the fitted step
        time, so that stalls of the whole machine do not count."""
        cost, tokens = self.cost, self._sum("decode_tokens")
        if cost is None or not tokens:
            return 0.0
        mixed = [step for step in self.reading.steps if step.get("decode_tokens") and step.get("prefill_tokens")]
        return sum(float(step["decode_tokens"]) for step in mixed if cost.of(step) > limit_s) / tokens

    # --- prompts

    def total(self, gauge: str) -> float:
        """What a counter grew by over the records; older records of a server may have been cut off."""
        steps = [step for step in self.reading.steps if gauge in step]
        last = self.reading.get(gauge) or 0.0
        if len(steps) < 2 or steps[0].get("step", 0) <= FIRST_RECORDED_STEP:
            return last
        return max(0.0, last - float(steps[0][gauge]))

    @cached_property
    def repeated(self) -> float:
        """Prompt tokens in a prefix that an earlier request had too."""
        return self.total("prefix_repeated_total")

    @cached_property
    def not_found(self) -> float:
        """Repeated tokens that were computed all the same; the last block of a prompt always is."""
        return max(0.0, self.repeated - self.total("prefix_hits_total"))

    @cached_property
    def total_busy_s(self) -> float:
        """Time in all steps, where only some were recorded, assuming the same tokens per second in both."""
        recorded = self._sum("decode_tokens")
        decoded = self.total("tokens_out_total") - self.total("requests_total")
        return self.busy_s * max(1.0, decoded / recorded) if recorded else self.busy_s

    @cached_property
    def prompt_share(self) -> float:
        """Share of the time in steps spent on prefill."""
        cost = self.cost
        if cost is None or not self.busy_s:
            return 0.0
        return min(1.0, sum(self._prompt_s(step, cost) for step in self.reading.steps) / self.busy_s)

    @staticmethod
    def _prompt_s(step: Record, cost: StepCost) -> float:
        names = ("prefill_tokens", "prefill_pairs", "prefill_rows", "prefill_past")
        tokens, query_keys, rows, past = (float(step.get(name, 0)) for name in names)
        alone = cost.base_s if tokens and not step.get("decode_tokens") else 0.0
        return alone + tokens * cost.prefill_s + query_keys * cost.pair_s + rows * cost.row_s + past * cost.past_s

    @cached_property
    def computed(self) -> float:
        """Prompt tokens computed in all steps, recorded or not."""
        return max(self._sum("prefill_tokens"), self.total("tokens_in_total") - self.total("prefix_hits_total"))

    @cached_property
    def filled_share(self) -> float:
        """Share of the time in steps that prefilled as many tokens as they may."""
        full = [step for step in self.reading.steps if step.get("prefill_tokens") and self._is_full(step)]
        return sum(map(_seconds, full)) / self.busy_s if self.busy_s else 0.0


def _seconds(step: Record) -> float:
    return float(step.get("engine_step_s", 0.0))


def with_queue(run: ServingRun, saved: float) -> float:
    """Share of a cause that saves this share of the steps' time. Where the saving is large enough and covers the
    excess of work, the queue goes with it."""
    return saved if run.batch_job or saved < max(QUEUE_CLEARING_SHARE, run.excess) else max(saved, run.queue_share)


def prompt_of_ttft(run: ServingRun) -> float:
    """Share of the time to first token in which the prompt was computed."""
    known = [request for request in run.reading.requests if "ttft_s" in request and "prefill_s" in request]
    ttft_s = sum(float(request["ttft_s"]) for request in known)
    return sum(float(request["prefill_s"]) for request in known) / ttft_s if ttft_s else 0.0


def mean_of(reading: Reading, gauge: str) -> float:
    """The mean of the values that are not zero."""
    return _mean(filter(None, reading.series(gauge)))


def _mean(values: Iterable[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else 0.0


def waiting(run: ServingRun) -> Evidence:
    return Evidence(gauge="waiting", value=mean_of(run.reading, "waiting"), expected=0.0, against="no queue")


def queue(run: ServingRun) -> Evidence:
    return Evidence(
        gauge="queue_p50_s",
        value=run.reading.get("queue_p50_s") or 0.0,
        expected=run.reading.get("e2e_p50_s"),
        against="a request's total time",
    )


def blocks(run: ServingRun) -> Evidence:
    steps = [step for step in run.queued or run.reading.steps if "kv_used_fraction" in step]
    used = _mean(float(step["kv_used_fraction"]) for step in steps)
    return Evidence(gauge="kv_used_fraction", value=used, expected=1.0, against="all blocks")
