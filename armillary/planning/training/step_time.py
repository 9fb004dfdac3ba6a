"""Step time: T = compute + exposed communication + bubble + overhead, for every layout at once.

In each overlap window the longer of computation and exchange counts; the excess of the exchange is what shows. The
terms carry the names that plan, explain, table and search print.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from armillary.planning.device_model.layout_arrays import (
    FULL,
    SCHEDULES,
    SELECTIVE,
    Array,
    Ints,
    Layouts,
    distinct,
    taken,
)
from armillary.planning.training import communication, offload
from armillary.planning.training import step_overhead as overhead
from armillary.planning.training.communication import CONTENTION, Exchange, LayerExchanges
from armillary.planning.training.compute import Work, ends_work, layer_work, nothing
from armillary.planning.training.parameters_per_device import Held, held
from armillary.planning.training.stages import Stages, split
from armillary.planning.training.train_case import TrainCase

_KEYS = ("micro_batch", "cp", "tp", "sequence_parallel", "ep", "precision", "fp8_scaling", "interleave")
"""fields that a layer's time depends on; layouts that agree in them share one calculation"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on every layout, term by term."""

    micro_batches: Array
    """a rank's micro-batches a step"""
    gemm: Array
    """matrix products of the model, forward and backward"""
    attention: Array
    """attention, forward and backward"""
    memory: Array
    """what memory bounds: norms, activations, casts, loss"""
    recompute: Array
    """activations made again"""
    contention: Array
    """computation slowed by exchanges hidden beside it"""
    turn: Array
    """a micro-batch on the slowest stage, exchanges inside its layers included"""
    mean_turn: Array
    """the same on the mean stage"""
    exchanges: dict[str, Exchange]
    """tp, cp, ep, gradients, weights, pp"""
    fill: Array
    """pipeline filling and draining"""
    imbalance: Array
    """waiting for the fullest stage"""
    optimizer: Array
    """the optimiser's pass over its states"""
    launch: Array
    """kernels waited for"""
    straggle: Array
    """waiting for the slowest node"""
    data: Array
    """waiting for the batch, where a loader was measured"""
    other: Array
    """what a step costs by itself"""
    offload: Array
    """standing still for the host: its optimiser and copies that nothing hides"""
    layer: Work = field(repr=False)
    """one layer, one micro-batch (averaged over kinds)"""
    held: Held = field(repr=False)
    """parameters on a device"""
    stages: Stages = field(repr=False)
    """the split over pipeline stages"""

    @property
    def compute(self) -> Array:
        return self.gemm + self.attention + self.memory + self.recompute + self.contention

    @property
    def comm(self) -> Array:
        return sum((one.total for one in self.exchanges.values()), np.zeros_like(self.gemm))

    @property
    def exposed(self) -> Array:
        return sum((one.exposed for one in self.exchanges.values()), np.zeros_like(self.gemm))

    @property
    def bubble(self) -> Array:
        return self.fill + self.imbalance

    @property
    def overhead(self) -> Array:
        return self.optimizer + self.launch + self.straggle + self.data + self.other + self.offload

    @property
    def total(self) -> Array:
        return self.compute + self.exposed + self.bubble + self.overhead


def step_time(case: TrainCase, layouts: Layouts) -> StepTime:
    """Price every layout."""
    small, back = _unique(layouts)
    layer, sent, first, last = _parts(case, small)
    layer, sent, first, last = taken(layer, back), taken(sent, back), taken(first, back), taken(last, back)
    return _assemble(case, layouts, layer, sent, first.plus(last), last)


def _assemble(case: TrainCase, layouts: Layouts, layer: Work, sent: LayerExchanges, ends: Work, last: Work) -> StepTime:
    stages = split(case, layouts)
    mine = held(case, layouts, stages)
    m = np.maximum(case.batch_tokens / (case.sequence * layouts.micro_batch * layouts.dp), 1.0)
    turn = _turn(layouts, stages, layer, sent, ends, last)
    whole = ends.scaled(1 / layouts.pp).plus(layer.scaled(stages.mean))
    waits = overhead.launch_s(case, layouts, whole, turn.mean)
    exchanges, wall = _exchanges(case, layouts, sent, mine, turn.slowest + waits, m, stages)
    hidden = sum((one.hidden for one in exchanges.values()), np.zeros(len(layouts)))
    share = _backward_share(layouts)
    return StepTime(
        micro_batches=m,
        gemm=m * (whole.gemm_forward + whole.gemm_backward),
        attention=m * (whole.attention_forward + whole.attention_backward),
        memory=m * (whole.memory_forward + whole.memory_backward),
        recompute=m * stages.mean * turn.again,
        contention=CONTENTION * hidden,
        turn=turn.slowest,
        mean_turn=turn.mean,
        exchanges=exchanges,
        fill=bubble_s(
            layouts,
            turn.slowest * turn.forward,
            turn.slowest * (1 - turn.forward),
            stages.fullest * layer.gemm_backward / 2,
        ),
        imbalance=m * np.maximum(turn.slowest - turn.mean, 0.0),
        optimizer=overhead.optimizer_s(case, layouts, mine),
        launch=m * waits,
        straggle=overhead.straggle_s(case, layouts, m * turn.mean),
        data=overhead.data_s(case, layouts, m, m * wall + exchanges["pp"].exposed),
        other=np.full(len(layouts), overhead.STEP_S),
        offload=offload.offload_s(case, layouts, mine, m, wall * (1 - share), wall * share),
        layer=layer,
        held=mine,
        stages=stages,
    )


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A stage's turn with one micro-batch, exchanges inside layers included."""

    mean: Array
    """of the mean stage"""
    slowest: Array
    """of the slowest"""
    again: Array
    """what a layer's backward makes again"""
    forward: Array
    """of a layer's own time, the share of the forward pass"""


def _turn(layouts: Layouts, stages: Stages, layer: Work, sent: LayerExchanges, ends: Work, last: Work) -> _Turn:
    again = _again(layouts, layer)
    forward, backward = layer.forward, layer.backward + again
    per_layer = forward + backward + sent.exposed
    mean = stages.mean * per_layer + (ends.forward + ends.backward) / layouts.pp
    head = last.forward + last.backward
    last_turn = stages.last(per_layer, head) * per_layer + head
    slowest = np.where(layouts.pp == 1, mean, np.maximum(stages.fullest * per_layer, last_turn))
    return _Turn(mean=mean, slowest=slowest, again=again, forward=forward / (forward + backward))


def _exchanges(
    case: TrainCase, layouts: Layouts, sent: LayerExchanges, mine: Held, turn: Array, m: Array, stages: Stages
) -> tuple[dict[str, Exchange], Array]:
    """(every kind of exchange of a step, wall time of a micro-batch with what shows of them). Windows are wall time,
    since whatever holds a stage up hides exchanges too."""
    share = _backward_share(layouts)
    windows = communication.Windows(forward=turn * (1 - share), backward=turn * share)
    grads, gathers = communication.data_parallel(case, layouts, mine, windows, m)
    wall = turn + (grads.exposed + gathers.exposed) / m
    sends = communication.pipeline_sends(case, layouts, m, wall / layouts.interleave / 2)
    times = m * stages.mean
    return {
        "tp": _times(sent.tp, times),
        "cp": _times(sent.cp, times),
        "ep": _times(sent.ep, times),
        "gradients": grads,
        "weights": gathers,
        "pp": sends,
    }, wall


def _backward_share(layouts: Layouts) -> Array:
    """Of a micro-batch's time: the backward pass takes twice the forward's, and makes the forward again where asked."""
    return np.where(layouts.recompute == FULL, 3 / 4, 2 / 3)


def _again(layouts: Layouts, layer: Work) -> Array:
    """What a layer's backward makes again: its forward, or the parts that memory bounds."""
    every = 1.0 / layouts.recompute_every
    return np.select(
        [layouts.recompute == FULL, layouts.recompute == SELECTIVE],
        [layer.forward * every, layer.again_selective * every],
        0.0,
    )


def _times(one: Exchange, times: Array) -> Exchange:
    return Exchange(total=one.total * times, exposed=one.exposed * times)


# --- layouts that share a layer's time


def _unique(layouts: Layouts) -> tuple[Layouts, Ints]:
    """One layout of each set that agrees in _KEYS (and in how ep lies), and which of them each layout is."""
    columns = [getattr(layouts, name).astype(np.int64) for name in _KEYS] + [layouts.expert_tp]
    stacked = np.stack(columns, axis=1)
    code: Ints = np.zeros(len(layouts), dtype=np.int64)
    for column in stacked.T:
        values, inverse = distinct(column)
        code = code * len(values) + inverse
    first, back = distinct(code)
    return layouts.take(first), back


def _parts(case: TrainCase, layouts: Layouts) -> tuple[Work, LayerExchanges, Work, Work]:
    """The mean layer, what it sends, the embedding, the head."""
    counts, num_layers = Counter(case.model.layers), case.model.num_layers
    layer, sent = nothing(len(layouts)), None
    for kind, count in counts.items():
        work = layer_work(case, kind, layouts)
        found = communication.layer_exchanges(case, layouts, work, moe=kind.mlp == "moe")
        layer = layer.plus(work.scaled(count / num_layers))
        sent = _added(sent, found, count / num_layers)
    assert sent is not None
    first, last = ends_work(case, layouts)
    return layer, sent, first, last


def _added(one: LayerExchanges | None, other: LayerExchanges, weight: float) -> LayerExchanges:
    def part(name: str) -> Exchange:
        new: Exchange = getattr(other, name)
        old: Exchange | None = getattr(one, name) if one is not None else None
        total, exposed = new.total * weight, new.exposed * weight
        return (
            Exchange(total=total, exposed=exposed)
            if old is None
            else Exchange(total=old.total + total, exposed=old.exposed + exposed)
        )

    return LayerExchanges(tp=part("tp"), cp=part("cp"), ep=part("ep"))


ZERO_BUBBLE = SCHEDULES.index("zero_bubble")


def bubble_s(layouts: Layouts, forward: Array, backward: Array, weight_gradients: Array) -> Array:
    """Of every layout, with the times of a whole stage for one micro-batch."""
    is_split = layouts.schedule == ZERO_BUBBLE
    idle: Array = idle_s(is_split, layouts.pp, layouts.interleave, forward, backward, weight_gradients)
    return idle


def idle_s(is_split: Any, stages: Any, chunks: Any, forward: Any, backward: Any, weights: Any) -> Any:
    """(p−1)·(f + b)/v; where the backward pass is split into inputs i and weights w, (p−1)·(f + i − min(f, i, w))/v:
    the last stage waits for (p−1) forward passes and the first for (p−1) passes of inputs, whatever fills the rest."""
    inputs = backward - weights
    filled = forward + inputs - np.minimum(np.minimum(forward, inputs), weights)
    return (stages - 1) * np.where(is_split, filled, forward + backward) / chunks
