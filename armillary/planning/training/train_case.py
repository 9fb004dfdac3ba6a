"""TrainCase: what prices a training step, except the layout: model, cluster, batch, software.

Layouts are separate arrays, so that one case serves a plan, a table row and a search.
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
from armillary.planning.device_model.vectorised_layouts import Array, Layouts
from armillary.spec.hardware import Cluster
from armillary.spec.lora import targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

if TYPE_CHECKING:
    from armillary.planning.device_model.correction import Correction
    from armillary.store.peaks import Peaks


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA adapters beside frozen weights (Hu et al., arXiv 2106.09685; QLoRA, arXiv 2305.14314)."""

    parameters: int
    base_bytes: float = 2.0
    """bytes per frozen weight of a layer's matrices: 2 for bf16, about 0.56 for nf4 with its scales"""
    unsharded: int = 0
    """of the parameters, those that every tensor-parallel rank holds in full"""
    on: frozenset[str] | None = None
    """matrices with adapters (qkv, out, up, down); None: unknown, and all matrices are taken to store their inputs"""
    forward: tuple[float, float] = (0.0, 0.0)
    """elements that adapters read and write per token over all layers: (unsharded, sharded by tensor parallelism)"""
    backward: tuple[float, float] = (0.0, 0.0)
    """the same for the backward pass"""
    kernels: tuple[float, float] = (0.0, 0.0)
    """kernels of adapters over all layers: (forward, backward)"""
    inner: float = 0.0
    """elements per token that adapters store between A and B, over all layers"""

    def per_device(self, tp: Any) -> Any:
        """Adapter parameters on one device after tensor parallelism."""
        return self.unsharded + (self.parameters - self.unsharded) / tp


NF4 = 0.5 + 4 / 64
"""bytes per weight in nf4: half a byte, and one fp32 scale per block of 64"""


def lora_weights(model: ModelConfig, rank: int) -> int:
    """Parameters of adapters on the queries and values of every layer: rank · (inputs + outputs) of each."""
    return rank * model.num_layers * (3 * model.hidden + model.kv_heads * model.head_dim)


def read_lora(text: str, model: ModelConfig) -> Lora:
    """'16' is rank 16 beside 16-bit weights, '16:nf4' beside 4-bit weights (QLoRA)."""
    rank, _, base = text.strip().lower().partition(":")
    if not rank.isdecimal() or int(rank) < 1 or base not in ("", "bf16", "nf4"):
        raise BadInput(f"--lora {text} is not a rank; write it like --lora 16, or --lora 16:nf4 for 4-bit weights")
    return Lora(parameters=lora_weights(model, int(rank)), base_bytes=NF4 if base == "nf4" else 2.0)


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """A training step to be priced."""

    model: ModelConfig
    cluster: Cluster
    sequence: int
    batch_tokens: int
    software: Software = PHYSICS
    measured: Peaks | None = None
    measured_share: float = 1.0
    """share of those ceilings per device of the layout (processes that share a CPU)"""
    recorded: Peaks | None = None
    """ceilings of another device of this chip, where none was measured"""
    lora: Lora | None = None
    pure: bool = False
    """weights, gradients and moments are all in the working precision, without fp32 master weights"""
    extra_heads: int = 0
    """further output projections with losses (multi-token prediction)"""
    loss_chunk: int = 0
    """tokens per chunk of the loss; 0: the full micro-batch"""
    compiled: bool = False
    correction: Correction | None = None
    """factors from runs of this cluster (armillary plan calibrate)"""
    flash: bool = field(default=True)

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch_tokens < 1:
            raise BadInput(
                f"sequence={self.sequence} and batch_tokens={self.batch_tokens} must be at least 1; "
                "try --sequence 4096 --batch-tokens 4M"
            )

    @cached_property
    def curves(self) -> Curves:
        ceilings, kernel = self.measured or self.recorded, self.software.attention_kernel
        values = curves(self.cluster.chip, ceilings, kernel=kernel, share=self.measured_share)
        return replace(values, kernel_s=0.0) if self.software.eager_layers else values  # launch_s counts the calls

    @cached_property
    def last_activations(self) -> list[Any]:
        """Layouts whose activations were counted last, and the counts (planning.training.activations)."""
        return []

    @cached_property
    def network(self) -> Network:
        return network(self.cluster, self.measured)

    def micro_batches(self, layouts: Layouts) -> Array:
        """Micro-batches per rank and step; where rows are uneven, the rank with most rows counts."""
        rows = self.batch_tokens / (self.sequence * layouts.dp)
        rows = np.where(layouts.uneven, np.ceil(rows), rows)
        return np.maximum(rows / layouts.micro_batch, 1.0)

    def tokens(self, layouts: Layouts) -> Array:
        """Tokens per micro-batch on one device; context parallelism splits them."""
        return layouts.micro_batch * self.sequence / layouts.cp


KERNELS, FUSED_KERNELS = np.array([4.0, 6.0]), np.array([9.0, 13.0])
"""kernels (forward, backward) of an adapter on one matrix, and on fused matrices, whose B is expanded first"""
INPUTS, OUTPUTS = np.array([1.0, 5.0]), np.array([4.0, 2.0])
"""(forward, backward): how often the inputs and outputs of a matrix are read or written. Forward, A reads x; the output
of the base is copied, and B's output is added to the copy. Backward, the gradient is read for A's input and for B, and
x for A; dx is written and added."""


def lora_of(model: ModelConfig, job: TrainJob) -> Lora | None:
    """The adapters that the job trains; None where it trains every weight."""
    if not job.lora_rank:
        return None
    matrices = targets(model, job.lora_on)
    unsharded, sharded, kernels = np.zeros(2), np.zeros(2), np.zeros(2)
    for target in matrices.values():
        inputs, outputs = target.inputs * INPUTS, target.periods * sum(target.widths) * OUTPUTS
        split = np.zeros(2) if target.replicated else outputs if target.column else inputs
        unsharded, sharded = unsharded + inputs + outputs - split, sharded + split
        kernels = kernels + (FUSED_KERNELS if len(target.parts) > 1 else KERNELS)
    return Lora(
        parameters=sum(target.weights(job.lora_rank) for target in matrices.values()),
        unsharded=sum(target.unsharded_weights(job.lora_rank) for target in matrices.values()),
        on=frozenset(name.rpartition(".")[2] for name in matrices),
        forward=(float(unsharded[0]), float(sharded[0])),
        backward=(float(unsharded[1]), float(sharded[1])),
        kernels=(float(kernels[0]), float(kernels[1])),
        inner=float(sum(job.lora_rank * target.num_a for target in matrices.values())),
    )
