"""Adapters of a job, as a training step is priced with them: weights, what they move, what they keep.

Their products are thin, so memory bounds them: A reads its input, B writes an output that is added to the frozen one.
"""

from __future__ import annotations

import numpy as np

from armillary.planning.training.train_case import Lora
from armillary.spec.lora import Target, targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

KERNELS, FUSED_KERNELS = np.array([4.0, 6.0]), np.array([9.0, 13.0])
"""forward and backward, of a matrix of its own and of fused ones, whose B is spread out first"""
INPUTS, OUTPUTS = np.array([1.0, 5.0]), np.array([4.0, 2.0])
"""forward and backward: how often a matrix's inputs and outputs are read or written. Forward A reads x; the base's
outputs are copied, and B's product is added to the copy. Backward the gradient is read for A's input and for B; x for
A; dx is written and added."""


def lora_of(model: ModelConfig, job: TrainJob) -> Lora | None:
    """What the job trains beside frozen weights; none where it trains every weight."""
    if not job.lora_rank:
        return None
    found = targets(model, job.lora_on)
    whole, cut, kernels = np.zeros(2), np.zeros(2), np.zeros(2)
    for target in found.values():
        inputs, outputs = target.inputs * INPUTS, target.periods * sum(target.widths) * OUTPUTS
        whole, cut = whole + (inputs if target.column else outputs), cut + (outputs if target.column else inputs)
        kernels = kernels + (FUSED_KERNELS if len(target.parts) > 1 else KERNELS)
    return Lora(
        parameters=sum(target.weights(job.lora_rank) for target in found.values()),
        whole=sum(_left_whole(target, job.lora_rank) for target in found.values()),
        on=frozenset(name.rpartition(".")[2] for name in found),
        forward=(float(whole[0]), float(cut[0])),
        backward=(float(whole[1]), float(cut[1])),
        kernels=(float(kernels[0]), float(kernels[1])),
        inner=float(sum(job.lora_rank * target.num_a for target in found.values())),
    )


def _left_whole(target: Target, rank: int) -> int:
    """Weights that every tensor-parallel rank holds: A where outputs are cut, B where inputs are."""
    return rank * (target.num_a * target.inputs if target.column else target.periods * target.adapted)
