"""Stages: how many layers the fullest pipeline stage holds, and what stands at its ends.

Layers that divide evenly over all chunks leave the output projection as an extra on the last stage; otherwise the
embedding and the projection take a layer's place each (as Llama 3 405B did: 126 layers in 8 × 16 places).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.planning.layouts import Array, Bools, Layouts
from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The split of a model's layers, a figure a layout."""

    fullest: Array
    """layers of the fullest stage"""
    least_last: Array
    """fewest layers that the stage with the output projection can be left with"""
    mean: Array
    """layers a stage on average"""
    even: Bools
    """every chunk holds as many layers"""

    def last(self, layer_s: Array, head_s: Array) -> Array:
        """Layers of the last stage: as many as all others where they divide evenly, else so many that it takes no
        longer than a full stage, the projection included."""
        room = np.floor(self.fullest - head_s / np.maximum(layer_s, 1e-12))
        layers: Array = np.where(self.even, self.mean, np.clip(room, self.least_last, self.fullest))
        return layers


def split(model: ModelConfig, layouts: Layouts) -> Stages:
    """Layers over pp × interleave chunks."""
    num_layers = model.num_layers
    even = (num_layers % (layouts.pp * layouts.interleave) == 0) | (layouts.pp == 1)
    mean = num_layers / layouts.pp
    fullest = np.where(even, mean, np.ceil((num_layers + 2) / layouts.pp))
    least = np.maximum(num_layers - (layouts.pp - 1) * fullest, 0.0)
    return Stages(fullest=fullest, least_last=least, mean=mean, even=even)
