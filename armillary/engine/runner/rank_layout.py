"""The ranks of an engine: `pp` stages of layers, each on `tp` ranks; `ep` parts of the experts on the ranks of a stage;
or `dp` copies of attention, each on `tp` ranks.

Ranks are numbered stage by stage, or copy by copy, so that the ranks of each, which exchange most, are neighbours.

    stage   layers of stage s of n: from ⌊s · layers / n⌋ on
    tp      heads, MLPs and the vocabulary of a stage are divided over its ranks
    ep      the tp ranks are ep groups; each group has whole experts of its own, each rank of it 1 / (tp / ep) of them.
            Every rank routes all tokens and computes those of its experts; the all-reduce after the MLP adds them up
    dp      data-parallel attention: each copy of attention, dense MLPs, embedding and head has a KV cache and requests
            of its own. Experts are divided over all dp × tp ranks, and get the tokens of all copies (token_gather.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from armillary.engine.cache.layer_groups import stage_layers
from armillary.engine.runner.ranks.stage_transfer import Pipeline
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
    tp_rank: int = 0
    """this one's place among them"""

    def own(self, num_experts: int) -> range:
        each = num_experts // self.parts
        return range(self.part * each, (self.part + 1) * each)


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """This process among the ranks of an engine."""

    world: Group
    tp: Group
    """the ranks of its stage"""
    experts: Experts
    pipeline: Pipeline | None = None
    dp: Group | None = None
    """the ranks with the same shard of each copy of attention, where there are several"""

    @classmethod
    def sharded(cls, group: Group) -> RankLayout:
        """Tensor parallelism over all ranks, experts included."""
        return cls(world=group, tp=group, experts=Experts(tp=group.size, tp_rank=group.rank))

    @property
    def reports(self) -> bool:
        """Whether it tells rank 0 what its steps gave: the first rank of the last stage, or of every copy of attention
        but rank 0's own."""
        if self.pipeline is not None:
            return self.pipeline.is_last and not self.tp.rank
        return self.dp is not None and self.dp.rank > 0 and not self.tp.rank

    def layers(self, config: ModelConfig) -> range:
        """Those of its stage."""
        if self.pipeline is None:
            return range(config.num_layers)
        return stage_layers(config.num_layers, len(self.pipeline.ranks))[self.pipeline.stage]


def rank_layout(world: World, config: ModelConfig, *, pp: int = 1, ep: int = 1, dp: int = 1) -> RankLayout:
    """The place of this process; all ranks call this together. BadLayout where the model cannot be divided like that,
    before its weights are loaded."""
    for key, parts in (("pp", pp), ("dp_attention", dp)):
        if world.size % parts:
            fitting = max(n for n in range(1, parts) if world.size % n == 0)
            raise BadLayout(f"serve.{key}={parts} does not divide {world.size} ranks; try --set serve.{key}={fitting}")
    tp = world.size // (pp * dp)
    check_division(config, tp=tp, pp=pp, ep=ep, dp=dp)
    everyone = dist.group.WORLD
    assert everyone is not None, "several ranks have a process group"
    group = Group(name=everyone.group_name, size=world.size, rank=world.rank)
    if dp > 1:
        return _data_parallel(group, tp=tp, dp=dp, ep=ep)
    stage, rank = divmod(world.rank, tp)
    experts = _experts_of(rank, tp, ep)
    if pp == 1:
        return RankLayout(world=group, tp=group, experts=experts)
    stages = _neighbours(pp, tp)
    return RankLayout(
        world=group,
        tp=Group(name=stages[stage].group_name, size=tp, rank=rank),
        experts=experts,
        pipeline=Pipeline(stage, tuple(s * tp + rank for s in range(pp))),
    )


def _data_parallel(world: Group, *, tp: int, dp: int, ep: int) -> RankLayout:
    """Copies of attention, and experts divided over all ranks."""
    copy, rank = divmod(world.rank, tp)
    experts = _experts_of(world.rank, world.size, ep)
    if tp == 1:
        return RankLayout(world=world, tp=Group(name="", size=1, rank=0), experts=experts, dp=world)
    copies, lines = _neighbours(dp, tp), _lines(dp, tp)
    return RankLayout(
        world=world,
        tp=Group(name=copies[copy].group_name, size=tp, rank=rank),
        experts=experts,
        dp=Group(name=lines[rank].group_name, size=dp, rank=copy),
    )


def _neighbours(count: int, size: int) -> list[dist.ProcessGroup]:
    """Groups of `size` neighbours."""
    return [dist.new_group([s * size + r for r in range(size)]) for s in range(count)]


def _lines(count: int, size: int) -> list[dist.ProcessGroup]:
    """Groups of the ranks with the same place in each group of `size` neighbours."""
    return [dist.new_group([s * size + r for s in range(count)]) for r in range(size)]


def _experts_of(rank: int, size: int, ep: int) -> Experts:
    part, tp_rank = divmod(rank, size // ep)
    return Experts(parts=ep, part=part, tp=size // ep, tp_rank=tp_rank)


def check_division(config: ModelConfig, *, tp: int, pp: int = 1, ep: int = 1, dp: int = 1) -> None:
    """BadLayout for a model that cannot be divided evenly."""
    if pp > config.num_layers:
        raise BadLayout(f"serve.pp={pp} stages need as many layers and {config.name} has {config.num_layers}; lower it")
    if dp > 1 and config.moe is None:
        raise BadLayout(
            f"{config.name} has no experts to divide over serve.dp_attention={dp} ranks, each of which would be a "
            "replica; leave it 1, and start replicas with armillary up"
        )
    if ep > 1 or dp > 1:
        _check_experts(config, tp * dp, ep)
    layout, case = Layout(tp=tp, ep=tp if ep > 1 or dp > 1 else 1), Case(model=config, for_training=False)
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
        advice = f"try --set serve.ep={near(ep, able)}" if able else "no serve.ep does; take another number of ranks"
        raise BadLayout(
            f"serve.ep={ep} does not divide {tp} ranks, {moe.num_experts} experts and their ffn of {moe.ffn}; {advice}"
        )
