"""The ranks of an engine: `pp` stages of layers, each on `tp` ranks; `ep` parts of the experts on the ranks of a stage.

Ranks are numbered stage by stage, so that the ranks of a stage, which exchange most, are neighbours.

    stage   layers of stage s of n: from ⌊s · layers / n⌋ on
    tp      heads, MLPs and the vocabulary of a stage are divided over its ranks
    ep      the tp ranks are ep groups; each group has whole experts of its own, each rank of it 1 / (tp / ep) of them.
            Every rank routes all tokens and computes those of its experts; the all-reduce after the MLP adds them up
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.engine.cache.layer_groups import stage_layers
from armillary.errors import BadLayout
from armillary.parallel.collectives import Group
from armillary.parallel.world import World
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import near, tp_holds, tp_says
from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Which part of every expert tensor a rank has."""

    parts: int = 1
    part: int = 0
    tp: int = 1
    """ranks that share an expert"""

    def own(self, num_experts: int) -> range:
        each = num_experts // self.parts
        return range(self.part * each, (self.part + 1) * each)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A stage among the stages with the same shard. Hidden states go from stage to stage, what the last one samples to
    all: each keeps the tokens of its rows."""

    stage: int
    ranks: tuple[int, ...]
    """of the world, by stage"""
    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """From the stage before."""
        hidden = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(hidden, src=self.ranks[self.stage - 1])
        return hidden

    def send(self, hidden: Tensor) -> None:
        """To the next stage."""
        dist.send(hidden.contiguous(), dst=self.ranks[self.stage + 1])

    def from_last(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor on every stage; the others give one of the same shape and dtype."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self.ranks[-1], group=self.group)
        return tensor


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """This process among the ranks of an engine."""

    world: Group
    tp: Group
    """the ranks of its stage"""
    experts: Experts
    pipeline: Pipeline | None = None

    @classmethod
    def sharded(cls, group: Group) -> RankLayout:
        """Tensor parallelism over all ranks, experts included."""
        return cls(world=group, tp=group, experts=Experts(tp=group.size))

    def layers(self, config: ModelConfig) -> range:
        """Those of its stage."""
        if self.pipeline is None:
            return range(config.num_layers)
        return stage_layers(config.num_layers, len(self.pipeline.ranks))[self.pipeline.stage]


def rank_layout(world: World, config: ModelConfig, *, pp: int = 1, ep: int = 1) -> RankLayout:
    """The place of this process; all ranks call this together. BadLayout where the model cannot be divided like that,
    before its weights are loaded."""
    if world.size % pp:
        fitting = max(n for n in range(1, pp) if world.size % n == 0)
        raise BadLayout(f"serve.pp={pp} does not divide {world.size} ranks; try --set serve.pp={fitting}")
    tp = world.size // pp
    check_division(config, tp=tp, pp=pp, ep=ep)
    everyone = dist.group.WORLD
    assert everyone is not None, "several ranks have a process group"
    stage, rank = divmod(world.rank, tp)
    group = Group(name=everyone.group_name, size=world.size, rank=world.rank)
    parts = Experts(parts=ep, part=rank // (tp // ep), tp=tp // ep)
    if pp == 1:
        return RankLayout(world=group, tp=group, experts=parts)
    stages = [dist.new_group([s * tp + r for r in range(tp)]) for s in range(pp)]
    lines = [dist.new_group([s * tp + r for s in range(pp)]) for r in range(tp)]
    return RankLayout(
        world=group,
        tp=Group(name=stages[stage].group_name, size=tp, rank=rank),
        experts=parts,
        pipeline=Pipeline(stage=stage, ranks=tuple(s * tp + rank for s in range(pp)), group=lines[rank]),
    )


def check_division(config: ModelConfig, *, tp: int, pp: int = 1, ep: int = 1) -> None:
    """BadLayout for a model that cannot be divided evenly."""
    if pp > config.num_layers:
        raise BadLayout(f"serve.pp={pp} stages need as many layers and {config.name} has {config.num_layers}; lower it")
    if ep > 1:
        _check_experts(config, tp, ep)
    layout, case = Layout(tp=tp, ep=tp if ep > 1 else 1), Case(model=config, for_training=False)
    if not tp_holds(layout, case):
        raise BadLayout(tp_says(layout, case, "--tp "))
    if config.qk_norm == "all" and config.norm != "rms" and tp > 1:
        raise BadLayout(f"{config.name} norms all heads together by their mean, which is not sharded here; use --tp 1")


def _check_experts(config: ModelConfig, tp: int, ep: int) -> None:
    moe = config.moe
    if moe is None:
        raise BadLayout(f"{config.name} has no experts for serve.ep={ep}; leave it 1")
    able = [n for n in range(1, tp + 1) if tp % n == 0 and moe.num_experts % n == 0 and moe.ffn % (tp // n) == 0]
    if ep not in able:
        raise BadLayout(
            f"serve.ep={ep} does not divide {tp} ranks, {moe.num_experts} experts and their ffn of {moe.ffn}; try "
            f"--set serve.ep={near(ep, able)}"
        )
