"""TrainCase: everything that prices a training step but the layout: model, cluster, batch, software.

Layouts come beside it as arrays, so that one case serves a plan, a table row and a search.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.errors import BadInput
from armillary.planning.device_model.efficiency import Curves, curves
from armillary.planning.device_model.frameworks import PHYSICS, Software
from armillary.planning.device_model.network import Network, network
from armillary.spec.hardware import Cluster
from armillary.spec.lora import Target, targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

if TYPE_CHECKING:
    from armillary.store.peaks import Peaks


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters trained beside frozen weights (Hu et al., arXiv 2106.09685; QLoRA, arXiv 2305.14314)."""

    parameters: int
    """weights of all adapters"""
    base_bytes: float = 2.0
    """bytes of one frozen weight that is a matrix of a layer: 2 bf16, about 0.56 nf4 with its scales"""
    whole: int = 0
    """of the weights, those that tensor parallelism leaves whole on each rank"""
    on: frozenset[str] | None = None
    """matrices that carry them (qkv, out, up, down); none: not known, all are taken to keep their inputs"""
    forward: tuple[float, float] = (0.0, 0.0)
    """numbers that adapters read and write a token, over all layers: left whole and cut by tensor parallelism"""
    backward: tuple[float, float] = (0.0, 0.0)
    """of the backward pass"""
    kernels: tuple[float, float] = (0.0, 0.0)
    """kernels of adapters, over all layers: forward and backward"""
    inner: float = 0.0
    """numbers a token that adapters keep between A and B, over all layers"""

    def held(self, tp: Any) -> Any:
        """Weights of adapters on one device, before anything else is shared out."""
        return self.whole + (self.parameters - self.whole) / tp


NF4 = 0.5 + 4 / 64
"""bytes of a weight in nf4: half, and an fp32 scale a block of 64"""


def lora_weights(model: ModelConfig, rank: int) -> int:
    """Weights of adapters on the queries and values of every layer: rank · (inputs + outputs) of each."""
    return rank * model.num_layers * (3 * model.hidden + model.kv_heads * model.head_dim)


def read_lora(text: str, model: ModelConfig) -> Lora:
    """'16' is adapters of rank 16 beside 16-bit weights, '16:nf4' beside weights in 4 bits (QLoRA)."""
    rank, _, base = text.strip().lower().partition(":")
    if not rank.isdecimal() or int(rank) < 1 or base not in ("", "bf16", "nf4"):
        raise BadInput(f"--lora {text} is not a rank; write it like --lora 16, or --lora 16:nf4 for 4-bit weights")
    return Lora(parameters=lora_weights(model, int(rank)), base_bytes=NF4 if base == "nf4" else 2.0)


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """A training step to be priced."""

    model: ModelConfig
    """what is trained"""
    cluster: Cluster
    """on what"""
    sequence: int
    """tokens of a sequence"""
    batch_tokens: int
    """tokens of a step"""
    software: Software = PHYSICS
    """what the kernels and the framework do; physics alone unless said otherwise"""
    measured: Peaks | None = None
    """ceilings of this very device, where they were measured"""
    measured_share: float = 1.0
    """of those ceilings, what one device of the layout has (processes that share a CPU)"""
    lora: Lora | None = None
    """adapters; none: every weight is trained"""
    pure: bool = False
    """weights, gradients and moments all in the working precision, no fp32 master"""
    extra_heads: int = 0
    """further output projections and losses (multi-token prediction)"""
    loss_chunk: int = 0
    """tokens whose logits exist at once; 0: all of a micro-batch"""
    compiled: bool = False
    """layers are compiled by torch"""
    flash: bool = field(default=True)
    """attention without the score matrix in memory"""

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch_tokens < 1:
            raise BadInput(
                f"sequence={self.sequence} and batch_tokens={self.batch_tokens} must be at least 1; "
                "try --sequence 4096 --batch-tokens 4M"
            )

    @cached_property
    def curves(self) -> Curves:
        found = curves(
            self.cluster.chip, self.measured, kernel=self.software.attention_kernel, share=self.measured_share
        )
        return replace(found, kernel_s=0.0) if self.software.plain_layers else found  # calls are counted apart

    @cached_property
    def network(self) -> Network:
        return network(self.cluster, self.measured)


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
