"""Parameters per device, dense and routed separately, since different ranks shard them.

Counts come from spec.arithmetic.params. Tensor parallelism shards projections and MLPs, expert parallelism the routed
experts; norms and router are replicated.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.layout_arrays import Array, Layouts
from armillary.planning.training.stages import Stages
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.params import layer_parameters


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
