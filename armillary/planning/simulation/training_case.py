"""A recipe's training run as it is simulated: its pipeline by the planner's times, its faults by [faults]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from armillary.planning.cost.failures import HOUR, Failures, Goodput, expected_goodput
from armillary.planning.simulation.simulated_pipeline import PipelineCase, Played, StageSeconds, idle_fraction, seconds
from armillary.planning.simulation.simulated_training import (
    SimulatedTraining,
    TrainingCase,
    TrainingRun,
    interval_steps,
)
from armillary.planning.training.stages import stage_layers
from armillary.spec.tables.faults import Faults

if TYPE_CHECKING:
    from armillary.planning.training.training_plan import TrainingPlan

_STEPS = 16
"""noisy steps whose median counts"""
_MOST_PIPELINES = 16
"""data-parallel pipelines of a noisy step that are played through; a step waits for the slowest"""


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A training plan with its pipeline, and what happens to it over weeks."""

    planned: TrainingPlan
    faults: Faults
    pipeline: PipelineCase
    rest_s: float
    """of a step beside its pipeline: exposed gradient communication, optimizer, launches, stragglers among nodes"""

    @cached_property
    def played(self) -> list[Played]:
        """A step without a slow stage."""
        return self.pipeline.play(noise=self.faults.noise, seed=self.faults.seed)

    @cached_property
    def step_s(self) -> float:
        return self._step_s(None)

    @cached_property
    def slow_step_s(self) -> float:
        """With one slow device, on the stage where that costs most."""
        stages = range(len(self.pipeline.stages))
        return max(self._step_s(stage) for stage in {0, len(stages) // 2, len(stages) - 1})

    def _step_s(self, slow: int | None) -> float:
        """The median of noisy steps, each as long as the slowest of its pipelines."""
        noise, slowdown = self.faults.noise, self.faults.straggler_slowdown
        if not noise:
            return seconds(self.pipeline.play(slow=slow, slowdown=slowdown)) + self.rest_s
        pipelines = min(_MOST_PIPELINES, self.planned.prediction.layout().dp)
        times = []
        for step in range(_STEPS):
            begin = (self.faults.seed * _STEPS + step) * pipelines
            plays = (
                self.pipeline.play(noise=noise, seed=begin + i, slow=slow if not i else None, slowdown=slowdown)
                for i in range(pipelines)
            )
            times.append(max(map(seconds, plays)))
        return median(times) + self.rest_s

    @cached_property
    def run(self) -> TrainingRun:
        """The weeks."""
        return SimulatedTraining(self.training_case, seed=self.faults.seed).run()

    @cached_property
    def training_case(self) -> TrainingCase:
        faults, job, failures = self.faults, self.planned.problem.recipe.train, self.failures
        devices, slow_h = failures.num_devices, faults.straggler_mtbf_h
        interval_s = faults.checkpoint_interval_s
        if interval_s is None:
            saved = job.save_every
            interval_s = saved * self.step_s if saved else expected_goodput(failures).interval_s
        return TrainingCase(
            step_s=self.step_s,
            slow_step_s=self.slow_step_s,
            steps=job.steps,
            interval_steps=interval_steps(interval_s, self.step_s),
            checkpoint_s=failures.checkpoint_s,
            restart_s=failures.restart_s,
            mtbf_s=failures.mtbf_s,
            straggler_mtbf_s=inf if slow_h is None else slow_h * HOUR / devices,
            straggler_s=faults.straggler_s,
            longest_s=faults.days * 24 * HOUR,
        )

    @cached_property
    def goodput(self) -> Goodput:
        """The same by Daly's formula, which knows no stragglers."""
        return expected_goodput(self.failures, self.training_case.interval_steps * self.step_s)

    @cached_property
    def failures(self) -> Failures:
        faults, known = self.faults, self.planned.goodput.failures
        return Failures(
            num_devices=self.planned.prediction.layout().num_devices,
            device_mtbf_s=faults.device_mtbf_h * HOUR,
            checkpoint_s=known.checkpoint_s if faults.checkpoint_s is None else faults.checkpoint_s,
            restart_s=faults.restart_s,
        )

    @cached_property
    def gauges(self) -> dict[str, float]:
        """Gauge -> value."""
        run, job = self.run, self.planned.problem.recipe.train
        gauges = {
            "step_s": self.step_s,
            "bubble_fraction": idle_fraction(self.played, len(self.pipeline.stages)),
            "tokens_per_s": run.steps * job.batch_tokens / run.now_s if run.now_s else 0.0,
            "goodput_fraction": run.goodput_fraction,
            "simulated_s": run.now_s,
            "steps_done": float(run.steps),
            "failures": float(run.failures),
            "stragglers": float(run.stragglers),
        }
        gauges |= {f"lost_{name}_fraction": share for name, share in run.lost().items()}
        if self.planned.cost is not None:
            planned_s = float(self.planned.prediction.time.total[0]) / self.planned.goodput.goodput_fraction
            usd_per_s = self.planned.cost.step_usd / planned_s
            gauges["usd"] = usd_per_s * run.now_s
        return gauges


def simulated_plan(planned: TrainingPlan, faults: Faults) -> SimulatedPlan:
    """The pipeline of the plan's layout."""
    time, layout = planned.prediction.time, planned.prediction.layout()
    work, batches = time.work, int(time.work.micro_batches[0])
    each = [max(0.0, x) for x in _stage_seconds(planned)]
    weights_share = float((work.layer.gemm_backward / 2 * work.stages.fullest / work.micro_batch_time)[0])
    share = float(work.forward_share[0])
    weights_share = min(weights_share, 1 - share)
    stages = [
        StageSeconds(forward_s=x * share, inputs_s=x * (1 - share - weights_share), weights_s=x * weights_share)
        for x in each
    ]
    sends = float(time.comm_costs["pp"].exposed[0])
    pipeline = PipelineCase(
        schedule=layout.schedule if layout.pp > 1 else "gpipe",
        stages=stages,
        chunks=layout.interleave if layout.pp > 1 else 1,
        micro_batches=batches,
        send_s=float(time.comm_costs["pp"].total[0]) / (2 * layout.interleave * batches),
    )
    inside = batches * float(work.mean_micro_batch_time[0]) + float(time.fill[0] + time.imbalance[0]) + sends
    return SimulatedPlan(planned=planned, faults=faults, pipeline=pipeline, rest_s=float(time.total[0]) - inside)


def _stage_seconds(planned: TrainingPlan) -> list[float]:
    """Forward and backward of a micro-batch on every stage, communication inside layers included."""
    work, prediction = planned.prediction.time.work, planned.prediction
    layers = stage_layers(planned.problem.case, prediction.layouts)
    if len(layers) == 1:
        return [float(work.mean_micro_batch_time[0])]
    layer = work.layer
    layer_s = float((layer.forward + layer.backward + work.recompute + work.layer_comm.exposed)[0])
    ends_s = (float(work.mean_micro_batch_time[0]) - float(work.stages.mean[0]) * layer_s) * len(layers)
    return [count * layer_s + (ends_s if i == len(layers) - 1 else 0.0) for i, count in enumerate(layers)]
