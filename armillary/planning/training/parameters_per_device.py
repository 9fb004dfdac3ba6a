"""Weights: how many parameters one device holds, dense and routed apart, since different ranks share them out.

Counts come from spec.params; tensor parallelism cuts projections and MLPs, expert parallelism the routed experts; norms
and router are whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.layout_arrays import Array, Layouts
from armillary.planning.training.stages import Stages
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.params import layer_parameters


@dataclass(frozen=True, kw_only=True)
class Held:
    """Parameters on one device of the fullest stage, before ZeRO shares anything out."""

    layer: Array
    """dense weights of a layer: attention, MLP, shared expert, router, norms"""
    experts: Array
    """routed experts of a layer"""
    ends: Array
    """embedding or output projection, whichever the stage has (both on a single stage)"""
    layers: Array
    """layers of the stage"""

    @property
    def dense(self) -> Array:
        return self.layer * self.layers + self.ends

    @property
    def routed(self) -> Array:
        return self.experts * self.layers

    @property
    def total(self) -> Array:
        return self.dense + self.routed


def held(case: TrainCase, layouts: Layouts, stages: Stages) -> Held:
    """What a device of the fullest stage holds; layers of different kinds are averaged over the stage."""
    model = case.model
    cut = whole = routed = 0.0
    counts = Counter(model.layers)
    for kind, count in counts.items():
        found = layer_parameters(model, model.layers.index(kind))
        cut += count * (found.attention + found.mlp + found.shared)
        whole += count * (found.norms + found.router)
        routed += count * found.experts
    layers = model.num_layers
    table = model.vocab * model.hidden
    positions = model.learned_positions * model.hidden if model.positions == "learned" else 0
    single = table * (1 if model.tied else 2) + positions
    ends = np.where(layouts.pp == 1, single, table + positions) / layouts.tp
    pieces = layouts.ep * layouts.expert_tp
    return Held(
        layer=cut / layers / layouts.tp + whole / layers,
        experts=routed / layers / pieces,
        ends=ends,
        layers=stages.fullest,
    )
