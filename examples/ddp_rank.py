"""What one rank of the scaling exercise does: train a small model for a few steps, with and without the exchange."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from armillary.model.attend import plain
from armillary.model.transformer import build
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.world import World, join_world
from armillary.spec import catalogue
from armillary.spec.job import TrainJob
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.training.loss import loss_sum
from armillary.training.optim import make_optimizer

SEQUENCE = 16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table: a model and the tokens each rank trains on a step."""

    model: str
    tokens: int

    def config(self) -> ModelConfig:
        """Without the vocabulary's share: a lookup sends gradients but hardly computes, which is a story of its own."""
        return replace(catalogue.model(self.model).config, vocab=512)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds on one rank, medians over the steps."""

    step_s: float
    """a whole step"""
    alone_s: float
    """the same step without the exchange of gradients"""
    exchange_s: float
    """the gradients' all-reduce with nothing beside it"""


def run(settings: list[Setting], *, steps: int, core: bool = True) -> list[dict[str, Any]] | None:
    """Time every setting on one thread pinned to a core of its own; rank 0 returns what it measured."""
    torch.set_num_threads(1)
    with join_world("cpu") as world:
        if core:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
        found = [asdict(setting) | asdict(timed(setting, world, steps)) for setting in settings]
    return found if world.is_main else None


def timed(setting: Setting, world: World, steps: int) -> Timed:
    layout = Layout(dp=world.size, precision="fp32", micro_batch=setting.tokens // SEQUENCE)
    model = build(setting.config(), dtype=torch.float32, device="cpu", seed=0)
    sharded = apply(model, layout, make_mesh(layout, world), loss=loss_sum)
    optimizer = make_optimizer(model, TrainJob())
    size = sum(parameter.numel() for parameter in model.parameters())
    step = training_step(sharded, optimizer, setting, world)
    gradients = torch.zeros(size)
    return Timed(
        step_s=median(lambda: step(exchange=True), steps, world),
        alone_s=median(lambda: step(exchange=False), steps, world),
        exchange_s=median(lambda: dist.all_reduce(gradients), steps, world) if world.size > 1 else 0.0,
    )


def training_step(
    sharded: Sharded, optimizer: torch.optim.Optimizer, setting: Setting, world: World
) -> Callable[..., None]:
    rows = setting.tokens // SEQUENCE
    random = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, sharded.model.config.vocab, (rows, SEQUENCE), generator=random)
    positions = torch.arange(SEQUENCE).expand(rows, SEQUENCE)
    total = setting.tokens * world.size

    def step(*, exchange: bool) -> None:
        with sharded.accumulate(last=exchange):  # gradients travel with the last micro-batch of a step
            hidden = sharded.model(tokens, positions, plain)
            (sharded.loss_sum(hidden, tokens, chunk=0) / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def median(call: Callable[[], object], steps: int, world: World) -> float:
    """Seconds of one call; ranks begin together, and the first call is not counted."""
    seconds = []
    for _ in range(steps + 1):
        if world.size > 1:
            dist.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
