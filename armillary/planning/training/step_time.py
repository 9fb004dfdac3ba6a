"""Step time of every layout at once: T_step = max(T_compute, T_comm) + T_bubble + T_overhead.

The maximum is taken per overlap window, so it equals T_compute plus the communication that no computation hides
(T_exposed). `plan`, `explain`, `table` and `search` print the terms under these names.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from armillary.planning.device_model.vectorised_layouts import (
    FULL,
    SCHEDULES,
    SELECTIVE,
    Array,
    Ints,
    Layouts,
    distinct,
    plus,
    scaled,
    take_rows,
)
from armillary.planning.training import communication, offload
from armillary.planning.training import step_overhead as overhead
from armillary.planning.training.communication import CONTENTION, CommCost, LayerComm
from armillary.planning.training.compute import ends_work, layer_work
from armillary.planning.training.op_times import Work
from armillary.planning.training.stages import DeviceParameters, Stages, device_parameters, split
from armillary.planning.training.train_case import TrainCase

_KEYS = ("micro_batch", "cp", "tp", "sequence_parallel", "ep", "precision", "fp8_scaling", "interleave")
"""fields that the time of a layer depends on; layouts with equal values share one calculation"""
ZERO_BUBBLE = SCHEDULES.index("zero_bubble")
COMPUTE_TERMS = ("gemm", "attention", "memory", "recompute", "contention")
OVERHEAD_TERMS = ("optimizer", "launch", "straggler", "data", "other", "offload")


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """One micro-batch on a pipeline stage of every layout."""

    micro_batches: Array
    """micro-batches per rank and step"""
    stages: Stages
    parameters: DeviceParameters
    layer: Work
    mean_stage: Work
    """the mean stage, with its share of embedding and output projection"""
    layer_comm: LayerComm
    recompute: Array
    """seconds that the backward pass of a layer recomputes"""
    forward_share: Array
    mean_micro_batch_time: Array
    """seconds on the mean stage, communication inside layers included"""
    micro_batch_time: Array
    """seconds on the slowest stage, communication inside layers included"""
    launch: Array


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds per step on every layout, term by term."""

    gemm: Array
    attention: Array
    memory: Array
    recompute: Array
    contention: Array
    """slowdown of compute by the communication that it hides"""
    comm_costs: dict[str, CommCost]
    """communication by kind: tp, cp, ep, gradients, weights, pp"""
    fill: Array
    imbalance: Array
    """waiting for the slowest pipeline stage"""
    optimizer: Array
    launch: Array
    straggler: Array
    data: Array
    """waiting for the batch, where a data loader was measured"""
    other: Array
    offload: Array
    work: StageWork = field(repr=False)

    @property
    def compute(self) -> Array:
        return self.gemm + self.attention + self.memory + self.recompute + self.contention

    @property
    def comm(self) -> Array:
        return sum((cost.total for cost in self.comm_costs.values()), np.zeros_like(self.gemm))

    @property
    def exposed(self) -> Array:
        return sum((cost.exposed for cost in self.comm_costs.values()), np.zeros_like(self.gemm))

    @property
    def bubble(self) -> Array:
        return self.fill + self.imbalance

    @property
    def overhead(self) -> Array:
        return self.optimizer + self.launch + self.straggler + self.data + self.other + self.offload

    @property
    def total(self) -> Array:
        """max(compute, communication) per overlap window + bubble + overhead."""
        return self.compute + self.exposed + self.bubble + self.overhead

    def shown_parts(self, i: int = 0) -> dict[str, float]:
        """Seconds of one layout by the names that people read; they add up to the step."""
        parts = {
            "GEMM": self.gemm,
            "attention": self.attention,
            "memory-bound": self.memory,
            "recompute": self.recompute + self.contention,
            "comm exposed": self.exposed,
            "bubble": self.bubble,
            "overhead": self.overhead,
        }
        return {name: max(0.0, float(seconds[i])) for name, seconds in parts.items()}


def step_time(case: TrainCase, layouts: Layouts) -> StepTime:
    """T_step = max(T_compute, T_comm) + T_bubble + T_overhead, with each maximum as T_compute + T_exposed."""
    work = stage_work(case, layouts)
    comm = comm_costs(case, layouts, work)
    time = StepTime(
        **compute_terms(work, comm),
        comm_costs=comm,
        **bubble_terms(layouts, work),
        **overhead_terms(case, layouts, work, comm),
        work=work,
    )
    return time if case.correction is None else _corrected(time, case.correction.factors)


def _corrected(time: StepTime, factors: Mapping[str, float]) -> StepTime:
    """Every term times the factor of its part: bubbles follow computation, communication its exposed seconds."""
    parts = {"compute": (*COMPUTE_TERMS, "fill", "imbalance"), "overhead": OVERHEAD_TERMS}
    terms = {name: getattr(time, name) * factors[part] for part, names in parts.items() for name in names}
    comm = {kind: scaled(cost, factors["communication"]) for kind, cost in time.comm_costs.items()}
    return replace(time, **terms, comm_costs=comm)


# --- compute


def compute_terms(work: StageWork, comm: dict[str, CommCost]) -> dict[str, Array]:
    """Seconds that a step computes, by kind of operation."""
    m, stage = work.micro_batches, work.mean_stage
    return {
        "gemm": m * (stage.gemm_forward + stage.gemm_backward),
        "attention": m * (stage.attention_forward + stage.attention_backward),
        "memory": m * (stage.memory_forward + stage.memory_backward),
        "recompute": m * work.stages.mean * work.recompute,
        "contention": CONTENTION * sum((cost.hidden for cost in comm.values()), np.zeros_like(m)),
    }


def stage_work(case: TrainCase, layouts: Layouts) -> StageWork:
    """One micro-batch on the mean and on the slowest stage. Layouts that agree in _KEYS share the time of a layer."""
    unique, index = _unique(layouts, by_stages=case.software.ep_overlap_alone)
    layer, comm, first, last = _layer_and_ends(case, unique)
    layer, comm = take_rows(layer, index), take_rows(comm, index)
    first, last = take_rows(first, index), take_rows(last, index)
    stages = split(case, layouts)
    recompute = _recompute(case, layouts, layer)
    forward, backward = layer.forward, layer.backward + recompute
    per_layer = forward + backward + comm.exposed
    ends, head = plus(first, last), last.forward + last.backward
    mean_stage = plus(scaled(ends, 1 / layouts.pp), scaled(layer, stages.mean))
    mean = stages.mean * per_layer + (ends.forward + ends.backward) / layouts.pp
    last_stage = stages.last(per_layer, head) * per_layer + head
    return StageWork(
        micro_batches=case.micro_batches(layouts),
        stages=stages,
        parameters=device_parameters(case, layouts, stages),
        layer=layer,
        mean_stage=mean_stage,
        layer_comm=comm,
        recompute=recompute,
        forward_share=forward / (forward + backward),
        mean_micro_batch_time=mean,
        micro_batch_time=np.where(layouts.pp == 1, mean, np.maximum(stages.fullest * per_layer, last_stage)),
        launch=overhead.launch_s(case, layouts, mean_stage, mean),
    )


def _unique(layouts: Layouts, *, by_stages: bool) -> tuple[Layouts, Ints]:
    """(one layout per set that agrees in _KEYS and in expert_tp, the set of every layout)."""
    code: Ints = np.zeros(len(layouts), dtype=np.int64)
    names = (*_KEYS, "pp") if by_stages else _KEYS
    for column in (*(getattr(layouts, name).astype(np.int64) for name in names), layouts.expert_tp):
        values, inverse = distinct(column)
        code = code * len(values) + inverse
    first, index = distinct(code)
    return layouts.take(first), index


def _layer_and_ends(case: TrainCase, layouts: Layouts) -> tuple[Work, LayerComm, Work, Work]:
    """(mean layer, its communication, embedding, output projection with the loss)."""
    layers, comms = [], []
    for kind, count in Counter(case.model.layers).items():
        work, share = layer_work(case, kind, layouts), count / case.model.num_layers
        comm = communication.layer_comm(case, layouts, work, moe=kind.mlp == "moe")
        layers.append(scaled(work, share))
        comms.append(scaled(comm, share))
    return plus(*layers), plus(*comms), *ends_work(case, layouts)


def _recompute(case: TrainCase, layouts: Layouts, layer: Work) -> Array:
    """Seconds that the backward pass of a layer recomputes: its forward pass, or its memory-bound operations."""
    share = 1.0 / layouts.recompute_every
    repeated = layer.forward - (layer.last_projection if case.software.stops_early else 0.0)
    return np.select(
        [layouts.recompute == FULL, layouts.recompute == SELECTIVE],
        [repeated * share, layer.selective_recompute * share],
        0.0,
    )


# --- communication


def comm_costs(case: TrainCase, layouts: Layouts, work: StageWork) -> dict[str, CommCost]:
    """Every kind of communication per step. The windows that hide it are wall time, since whatever delays a stage
    hides communication as well."""
    m, waited, share = work.micro_batches, work.micro_batch_time + work.launch, _backward_share(layouts)
    windows = communication.Windows(forward=waited * (1 - share), backward=waited * share)
    gradients, weights = communication.data_parallel(case, layouts, work.parameters, windows, m)
    costs = {kind: scaled(getattr(work.layer_comm, kind), m * work.stages.mean) for kind in ("tp", "cp", "ep")}
    costs |= {"gradients": gradients, "weights": weights}
    chunk = wall_s(work, costs) / layouts.interleave / 2
    return costs | {"pp": communication.pipeline_sends(case, layouts, m, chunk)}


def wall_s(work: StageWork, comm: dict[str, CommCost]) -> Array:
    """Wall time of a micro-batch, with launches and exposed data-parallel communication."""
    exposed = comm["gradients"].exposed + comm["weights"].exposed
    return work.micro_batch_time + work.launch + exposed / work.micro_batches


def _backward_share(layouts: Layouts) -> Array:
    """Share of the backward pass in a micro-batch: twice the forward pass, and a forward pass with full recompute."""
    return np.where(layouts.recompute == FULL, 3 / 4, 2 / 3)


# --- bubble and overhead


def bubble_terms(layouts: Layouts, work: StageWork) -> dict[str, Array]:
    """Pipeline bubble: fill and drain, and waiting for the slowest stage."""
    time, forward = work.micro_batch_time, work.micro_batch_time * work.forward_share
    weights = work.stages.fullest * work.layer.gemm_backward / 2
    is_split = layouts.schedule == ZERO_BUBBLE
    return {
        "fill": idle_s(is_split, layouts.pp, layouts.interleave, forward, time * (1 - work.forward_share), weights),
        "imbalance": work.micro_batches * np.maximum(time - work.mean_micro_batch_time, 0.0),
    }


def idle_s(is_split: Any, stages: Any, chunks: Any, forward: Any, backward: Any, weights: Any) -> Any:
    """Fill and drain: (p−1)·(f + b)/v. Where the schedule splits the backward pass into input gradients i and weight
    gradients w: (p−1)·(f + i − min(f, i, w))/v, since the last stage waits for p−1 forward passes and the first for
    p−1 input-gradient passes, and weight gradients fill the rest."""
    inputs = backward - weights
    filled = forward + inputs - np.minimum(np.minimum(forward, inputs), weights)
    return (stages - 1) * np.where(is_split, filled, forward + backward) / chunks


def overhead_terms(case: TrainCase, layouts: Layouts, work: StageWork, comm: dict[str, CommCost]) -> dict[str, Array]:
    """What a step costs beside compute, communication and bubble."""
    m, parameters, wall, share = work.micro_batches, work.parameters, wall_s(work, comm), _backward_share(layouts)
    return {
        "optimizer": overhead.optimizer_s(case, layouts, parameters),
        "launch": m * work.launch,
        "straggler": overhead.straggler_s(case, layouts, m * work.mean_micro_batch_time),
        "data": overhead.data_s(case, layouts, m, m * wall + comm["pp"].exposed),
        "other": np.full(len(layouts), overhead.STEP_S),
        "offload": offload.offload_s(case, layouts, parameters, m, wall * (1 - share), wall * share),
    }
