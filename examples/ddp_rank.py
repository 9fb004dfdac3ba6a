"""One rank of the scaling exercise: steps of a small model with one rank alone, with two ranks without the all-reduce,
and with it, alternating, so that other load on the machine affects all three alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from ddp_accuracy import Target, to_accuracy

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.world import World, join_world
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.step.loss import loss_sum
from armillary.training.step.optimizer import make_optimizer

SEQUENCE = 16
LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table: a model and the tokens per rank and step."""

    model: str
    tokens: int

    def config(self) -> ModelConfig:
        """Without the vocabulary's share: a lookup sends gradients but hardly computes, which is a story of its own."""
        return replace(catalogue.model(self.model).config, vocab=512)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds on rank 0, medians over the rounds."""

    one_s: float
    """a step while the other rank sleeps: a run of one rank"""
    alone_s: float
    """the same step while the other rank does its own, without the exchange of gradients"""
    step_s: float
    """a whole step of both"""
    exchange_s: float
    """the gradients' all-reduce with nothing beside it"""
    spread: float
    """half the distance between the quartiles of one_s / step_s, round by round"""
    rounds: int


def run(settings: list[Setting], target: Target, *, batch: int, rounds: int, budget_s: float) -> dict[str, Any] | None:
    """Time every setting on two ranks, each with one thread on a core of its own, and train to the target; rank 0
    returns what it measured."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    # before gloo starts its threads, which then stay on the core of their rank
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    with join_world("cpu") as world:
        rows = [asdict(setting) | asdict(timed(setting, world, rounds, budget_s)) for setting in settings]
        reached = to_accuracy(target, batch, world)
    return {"rows": rows, "reached": [asdict(each) for each in reached]} if reached is not None else None


def timed(setting: Setting, world: World, rounds: int, budget_s: float) -> Timed:
    layout = Layout(dp=world.size, precision="fp32", micro_batch=setting.tokens // SEQUENCE)
    model = build(setting.config(), dtype=torch.float32, device="cpu", seed=0)
    sharded = apply(model, layout, make_mesh(layout, world), loss=loss_sum)
    step = training_step(sharded, make_optimizer(model, TrainJob()), setting, world)
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    kinds: dict[str, Callable[[], object]] = {
        "one_s": lambda: step(exchange=False) if world.is_main else None,
        "alone_s": lambda: step(exchange=False),
        "step_s": lambda: step(exchange=True),
        "exchange_s": lambda: dist.all_reduce(gradients),
    }
    seconds = in_turns(kinds, rounds, budget_s)
    ratios = [one / both for one, both in zip(seconds["one_s"], seconds["step_s"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    return Timed(**medians, spread=(high - low) / 2, rounds=len(ratios))


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


def in_turns(kinds: dict[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Seconds of every kind of step, round by round: as many rounds as asked, more while the budget lasts, and fewer
    on a busy machine, where three times the budget is spent. Ranks begin each together; the first two rounds do not
    count."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    begin, number = time.perf_counter(), 0
    more = torch.ones(())
    while more.item():
        for kind, call in kinds.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds[kind].append(time.perf_counter() - start)
        number += 1
        spent_s = time.perf_counter() - begin
        wanted = number < LEAST_ROUNDS + 2 or spent_s < budget_s or (number < rounds + 2 and spent_s < 3 * budget_s)
        more.fill_(float(wanted))
        dist.broadcast(more, src=0)  # rank 0's clock counts
    return {kind: found[2:] for kind, found in seconds.items()}
