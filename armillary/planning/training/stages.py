"""Pipeline stages: the number of layers per stage, where embedding and output projection are, and the parameters of a
device.

Our trainer splits by FLOPs, the output projection included (`spec.layout_rules.pipeline_split`). Other software is
taken to divide layers evenly: where they divide over all chunks, the projection is extra work of the last stage;
otherwise embedding and projection take the place of a layer each (as for Llama 3 405B: 126 layers in 8 × 16 places).

Parameters (spec.arithmetic.params) are counted dense and routed separately, since different ranks shard them: tensor
parallelism projections and MLPs, expert parallelism the routed experts; norms and router are replicated.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from armillary.planning.device_model.vectorised_layouts import Array, Bools, Ints, Layouts, distinct
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.params import layer_parameters
from armillary.spec.layout_rules.pipeline_split import layers_by_stage
from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Layers per pipeline stage of every layout."""

    first: Array
    fullest: Array
    fullest_at: Array
    """index of the fullest stage, the first of several"""
    least_last: Array
    """fewest layers that the stage with the output projection can have"""
    mean: Array
    is_exact: Bools
    """`least_last` is exact; otherwise the last stage gets as many layers as keep it no slower than the others"""

    def last(self, layer_s: Array, head_s: Array) -> Array:
        """Layers of the last stage."""
        capacity = np.floor(self.fullest - head_s / np.maximum(layer_s, 1e-12))
        return np.where(self.is_exact, self.least_last, np.clip(capacity, self.least_last, self.fullest))


def split(case: TrainCase, layouts: Layouts) -> Stages:
    """Layers over pp × interleave chunks."""
    even = _even(case.model.num_layers, layouts)
    if not case.software.balanced_stages or not (layouts.pp > 1).any():
        return even
    codes: Ints = np.stack([layouts.pp, layouts.interleave]).astype(np.int64)
    first, back = distinct(codes[0] * (codes[1].max() + 1) + codes[1])
    rows = np.array([_balanced(case, int(codes[0, i]), int(codes[1, i])) for i in first])[back]
    known = rows[:, 0] >= 0

    def chosen(column: int, otherwise: Array) -> Array:
        return np.where(known, rows[:, column], otherwise)

    return Stages(
        first=chosen(0, even.first),
        fullest=chosen(1, even.fullest),
        fullest_at=chosen(2, even.fullest_at),
        least_last=chosen(3, even.least_last),
        mean=even.mean,
        is_exact=known | even.is_exact,
    )


def stage_layers(case: TrainCase, layouts: Layouts) -> list[float]:
    """Layers of every stage of a single layout."""
    stages, pp = split(case, layouts), int(layouts.pp[0])
    if case.software.balanced_stages and pp * int(layouts.interleave[0]) <= case.model.num_layers + 2:
        return [float(n) for n in layers_by_stage(case.model, pp, int(layouts.interleave[0]), sequence=case.sequence)]
    last = stages.fullest if stages.is_exact[0] else np.maximum(stages.least_last, 1.0)
    return [float(stages.fullest[0])] * (pp - 1) + [float(last[0])]


def _balanced(case: TrainCase, pp: int, interleave: int) -> tuple[float, float, float, float]:
    """(first, fullest, its index, last) as our trainer splits; -1 where there are more chunks than places."""
    if pp * interleave > case.model.num_layers + 2:
        return -1.0, -1.0, -1.0, -1.0
    counts = _counts(case.model, pp, interleave, case.sequence)
    fullest = max(counts)
    return counts[0], fullest, counts.index(fullest), counts[-1]


@lru_cache(maxsize=4096)
def _counts(model: ModelConfig, pp: int, interleave: int, sequence: int) -> tuple[float, ...]:
    """Layers by stage; kept, since memory, time and every node of a ranking ask for the same."""
    return tuple(layers_by_stage(model, pp, interleave, sequence=sequence))


def _even(num_layers: int, layouts: Layouts) -> Stages:
    divides = (num_layers % (layouts.pp * layouts.interleave) == 0) | (layouts.pp == 1)
    mean = num_layers / layouts.pp
    fullest = np.where(divides, mean, np.ceil((num_layers + 2) / layouts.pp))
    least = np.where(divides, mean, np.maximum(num_layers - (layouts.pp - 1) * fullest, 0.0))
    return Stages(
        first=fullest, fullest=fullest, fullest_at=np.zeros(len(layouts)), least_last=least, mean=mean, is_exact=divides
    )


# --- parameters


@dataclass(frozen=True, kw_only=True)
class DeviceParameters:
    """Parameters on one device of the fullest stage, before ZeRO shards them."""

    layer: Array
    """dense parameters per layer: attention, MLP, shared expert, router, norms; `experts` are the routed ones"""
    experts: Array
    ends: Array
    """embedding or output projection, whichever the stage has (both on a single stage)"""
    layers: Array

    @property
    def dense(self) -> Array:
        return self.layer * self.layers + self.ends

    @property
    def routed(self) -> Array:
        return self.experts * self.layers

    @property
    def total(self) -> Array:
        return self.dense + self.routed


def device_parameters(case: TrainCase, layouts: Layouts, stages: Stages) -> DeviceParameters:
    """Parameters on a device of the fullest stage; the kinds of layers are averaged."""
    model, num_layers = case.model, case.model.num_layers
    sharded = replicated = routed = 0.0
    for kind, count in Counter(model.layers).items():
        layer = layer_parameters(model, model.layers.index(kind))
        sharded += count * (layer.attention + layer.mlp + layer.shared)
        replicated += count * (layer.norms + layer.router)
        routed += count * layer.experts
    table = model.vocab * model.hidden
    positions = model.learned_positions * model.hidden if model.positions == "learned" else 0
    single = table * (1 if model.tied else 2) + positions
    return DeviceParameters(
        layer=sharded / num_layers / layouts.tp + replicated / num_layers,
        experts=routed / num_layers / (layouts.ep * layouts.expert_tp),
        ends=np.where(layouts.pp == 1, single, table + positions) / layouts.tp,
        layers=stages.fullest,
    )
