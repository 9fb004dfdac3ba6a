"""Routers in training: the losses and the bias that keep experts in balance, and the gauges of how well they do.

Everything is counted over all ranks and micro-batches of a step, so it is the same on any layout.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.model.moe.experts import MixtureOfExperts
from armillary.model.moe.router_losses import Counts, RouterBalance, Rule
from armillary.parallel.apply import Sharded
from armillary.parallel.context.shard_sequence import Context
from armillary.parallel.mesh import Mesh
from armillary.spec.tables.train import TrainJob

# L layers with experts, E experts of each
TAIL = 0.1
"""an expert with less than this share of the mean load hardly learns"""
NEAR = 0.5
"""share of the mean load by which an expert must be off for its bias to move by the full rate"""


class Routers:
    """All routers of a model: `start` before a step's first forward pass, `finish` after its last backward pass."""

    def __init__(self, sharded: Sharded, job: TrainJob) -> None:
        self._sharded, self._rate = sharded, job.bias_rate
        config = sharded.model.config
        has_experts = [kind.mlp == "moe" for kind in config.layers]
        blocks = {int(name): block.mlp for name, block in sharded.model.blocks.items()}  # those that this rank has
        self._layers = {
            sum(has_experts[:number]): mlp for number, mlp in blocks.items() if isinstance(mlp, MixtureOfExperts)
        }
        self.has_experts = config.num_moe_layers > 0  # a pipeline stage without any takes part in the sums
        if config.moe is None or not self.has_experts:
            return
        device = sharded.mesh.world.device
        self._counts = Counts(config.moe.num_experts)
        self._tally = torch.zeros(config.num_moe_layers, self._counts.size, dtype=torch.float64, device=device)
        self._scale = torch.ones((), device=device)
        weight = config.moe.aux_loss if job.balance_loss is None else job.balance_loss
        over = config.num_moe_layers * job.batch_tokens
        self._aux_weight, self._z_weight = weight / over, job.router_z_loss / over
        for index, mixture in self._layers.items():
            mixture.balance = RouterBalance(
                aux_weight=self._aux_weight,
                z_weight=self._z_weight,
                capacity=job.expert_capacity,
                scale=self._scale,
                tally=self._tally[index],
                copies=mixture.copies,
                over_ranks=_over(sharded.mesh),
                over_rows=_over_rows(sharded.mesh),
            )

    def start(self, loss_scale: Tensor | None = None) -> None:
        """Forget the last step; `loss_scale` is what fp16 losses are multiplied by."""
        if self.has_experts:
            self._tally.zero_()
            if loss_scale is not None:
                self._scale.copy_(loss_scale)

    def finish(self, loss: Tensor | None = None, norm: Tensor | None = None) -> dict[str, Tensor]:
        """Move the selection biases by what all ranks counted, unless loss or gradient norm is not finite and the step
        was not taken; returns the gauges of the step."""
        if not self.has_experts:
            return {}
        check = None if loss is None or norm is None else loss.detach() + norm
        totals = self._sharded.total(self._tally)
        self._move_biases(totals[:, self._counts.load], check)
        return self._gauges(totals)

    @torch.no_grad()
    def _move_biases(self, load_LE: Tensor, check: Tensor | None) -> None:
        """Loss-free balancing (Wang et al. 2024): up by the rate below the mean load, down above it; near the mean in
        proportion, so that biases converge."""
        off_LE = 1.0 - load_LE / load_LE.mean(dim=-1, keepdim=True)
        moves_LE = self._rate * (off_LE / NEAR).clamp(-1.0, 1.0)
        if check is not None:
            moves_LE = torch.where(check.isfinite(), moves_LE, 0.0)
        for index, mixture in self._layers.items():
            bias_E = mixture.router.selection_bias
            trains = any(parameter.requires_grad for parameter in mixture.router.parameters())
            if bias_E is not None and trains:  # adapters leave routers as they are
                bias_E += moves_LE[index].to(bias_E.dtype)

    def _gauges(self, totals: Tensor) -> dict[str, Tensor]:
        """Over the layers that counted; none is counted where no gradient passes (adapters behind it)."""
        columns = self._counts
        load_LE = totals[:, columns.load]
        mean_L1 = load_LE.mean(dim=-1, keepdim=True)
        seen_L1 = mean_L1 > 0
        num_seen = seen_L1.sum().clamp_min(1)
        some_L1 = torch.where(seen_L1, mean_L1, 1.0)
        mixed_LE = totals[:, columns.probability]
        mixed_LE = mixed_LE / torch.where(seen_L1, mixed_LE.sum(dim=-1, keepdim=True), 1.0)
        losses_L = self._aux_weight * totals[:, columns.aux] + self._z_weight * totals[:, columns.z]
        return {
            "aux_loss": losses_L.sum(),
            "expert_load_max_over_mean": (load_LE.amax(dim=-1, keepdim=True) / some_L1).amax(),
            "expert_tail_fraction": (load_LE < TAIL * mean_L1).double().mean(dim=-1).sum() / num_seen,
            "expert_drop_fraction": totals[:, columns.dropped].sum() / load_LE.sum().clamp_min(1),
            "router_entropy": -torch.special.xlogy(mixed_LE, mixed_LE).sum() / num_seen,
        }


def _over(mesh: Mesh) -> Callable[[Tensor], Tensor] | None:
    """Sums over the ranks that share a row, with context parallelism."""
    if mesh.context is None:
        return None

    def summed(counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=mesh.context)
        return total

    return summed


def _over_rows(mesh: Mesh) -> Callable[[Rule, Tensor], Tensor] | None:
    """Applies a rule to full rows, with context parallelism."""
    if mesh.context is None:
        return None
    context = Context.of(mesh.context)
    return lambda rule, x_BTk: context.shard(rule(context.unshard(x_BTk)))
