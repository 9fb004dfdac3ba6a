"""How long stages stand idle: by the planner's formula, by an order played through on paper, and by stages that sleep.

Stages whose computing is a sleep of known length go through the same pipeline as a model's chunks, so what is measured
is the schedule and its exchanges. An order that was run, played through on a clock of its own, has no machine's load in
it. Used by pipeline_bubbles.py and by the tests of pipelines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.parallel.pipeline.pipeline import Pipeline, Rows, StageFns
from armillary.parallel.pipeline.stage import Received
from armillary.parallel.timers import Pass
from armillary.planning.training.step_time import idle_s
from armillary.spec.layout_rules.pipeline_split import Span


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one stage for one micro-batch."""

    forward_s: float
    """forward pass"""
    inputs_s: float
    """the half of the backward pass that makes gradients of inputs"""
    weights_s: float
    """the other half"""

    @property
    def turn_s(self) -> float:
        """All three."""
        return self.forward_s + self.inputs_s + self.weights_s


def idle_share(schedule: str, work: Work, *, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The planner's formula (`planning.bubble`): filling and draining, of m turns and that."""
    is_split, backward = schedule == "zero_bubble", work.inputs_s + work.weights_s
    fill = float(idle_s(is_split, stages, chunks, work.forward_s, backward, work.weights_s))
    return fill / (micro_batches * work.turn_s + fill)


# --- on paper


def replayed_idle(orders: Sequence[Sequence[Pass]], works: Sequence[Work], *, chunks: int = 1) -> float:
    """Share of the step in which stages stand idle, if hidden states travel in no time: `orders` and `works` are those
    of all stages. A pass begins once its stage is free and what it needs is there."""
    number = len(orders)
    done: dict[Pass, float] = {}
    free, busy, at = [0.0] * number, [0.0] * number, [0] * number
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        ready = [stage for stage in range(number) if _is_ready(orders[stage], at[stage], done, chunks * number)]
        assert ready, "an order in which every stage waits for another"
        for stage in ready:
            letter, chunk, batch = orders[stage][at[stage]]
            begin = max([free[stage], *(done[key] for key in _needs(letter, chunk, batch, chunks * number))])
            took = _seconds(letter, works[stage]) / chunks
            free[stage] = done[_made(letter), chunk, batch] = begin + took
            busy[stage] += took
            at[stage] += 1
    return 1.0 - sum(busy) / (number * max(free))


def _seconds(letter: str, work: Work) -> float:
    both = {"F": work.forward_s, "I": work.inputs_s, "W": work.weights_s}
    return both["I"] + both["W"] if letter == "B" else both[letter]


def _made(letter: str) -> str:
    """Both forms of the backward pass give the stage before what it waits for."""
    return "B" if letter in "BI" else letter


def _needs(letter: str, chunk: int, batch: int, num_chunks: int) -> list[Pass]:
    if letter == "F":
        return [("F", chunk - 1, batch)] if chunk else []
    if letter == "W":
        return [("B", chunk, batch)]
    return [("F", chunk, batch)] + ([("B", chunk + 1, batch)] if chunk + 1 < num_chunks else [])


def _is_ready(order: Sequence[Pass], at: int, done: dict[Pass, float], num_chunks: int) -> bool:
    return at < len(order) and all(key in done for key in _needs(*order[at], num_chunks))


# --- asleep


class _Through(torch.autograd.Function):
    """Hidden states as they are, after a while; their gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, inputs_s: float) -> Tensor:
        ctx.inputs_s = inputs_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.inputs_s)
        return grads[0], None, None


class _Weighed(torch.autograd.Function):
    """A weight's part of the result, whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, like: Tensor, weights_s: float) -> Tensor:
        ctx.weights_s = weights_s
        return weight.expand_as(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.weights_s)
        return grads[0].sum().reshape(1), None, None


class SleepingChunk(nn.Module):
    """One of the `parts` chunks of a stage, with the same face as a chunk of a model."""

    wire = torch.float32
    attends: Callable[..., Any] | None = None
    autocast: Callable[..., Any] = nullcontext

    def __init__(self, span: Span, work: Work, *, parts: int, hidden: int) -> None:
        super().__init__()
        self.span, self.work, self.parts, self.hidden = span, work, parts, hidden
        self.weight = nn.Parameter(torch.zeros(1))
        self.table = nn.Parameter(torch.zeros(1)) if span.first else None

    def forward(self, x: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        work, parts = self.work, self.parts
        x = Received.apply(x) if self.table is None else self.table.expand(*x.shape, self.hidden)
        through = _Through.apply(x, work.forward_s / parts, work.inputs_s / parts)
        return through + _Weighed.apply(self.weight, through.detach(), work.weights_s / parts)


def sleeping_pipeline(group: dist.ProcessGroup, work: Work, *, schedule: str, chunks: int = 1) -> Pipeline:
    """This rank's stage of as many as the group has ranks."""
    size, rank, hidden, total = group.size(), group.rank(), 8, group.size() * chunks
    spans = [Span(index=i, layers=range(0), first=i == 0, last=i == total - 1) for i in range(rank, total, size)]
    held: Any = SimpleNamespace(config=SimpleNamespace(hidden=hidden, tied=False))
    made: Any = [SleepingChunk(span, work, parts=chunks, hidden=hidden) for span in spans]
    return Pipeline(held, made, group, schedule=schedule, device=torch.device("cpu"))


def measured_idle(pipeline: Pipeline, *, num_micro_batches: int, steps: int = 2) -> float:
    """Share of a step in which stages stand idle, the mean over the stages and the least over some steps; the first
    step, which makes connections, does not count."""
    tokens = torch.zeros(num_micro_batches, 4, dtype=torch.int64)
    rows = Rows(tokens_BT=tokens, positions_BT=tokens, targets_BT=tokens, documents_BT=None)
    stage_fns = StageFns(
        attends=lambda _: None,
        autocast=nullcontext,
        scale=lambda loss: loss,  # type: ignore[arg-type, return-value]
        loss=lambda chunk, hidden, targets: hidden.sum(),
    )
    found = []
    for _ in range(steps + 1):
        dist.barrier(pipeline.group)
        pipeline.step(rows, stage_fns, num_micro_batches=num_micro_batches)
        found.append(idle_of_all(pipeline))
    return min(found[1:])


def idle_of_all(pipeline: Pipeline) -> float:
    """Of the last step, over all stages: 1 - mean computing time / the longest stage's time from begin to end."""
    busy, whole = pipeline.timer.take()
    times = torch.tensor([busy, whole], dtype=torch.float64)
    every = [torch.empty_like(times) for _ in range(pipeline.size)]
    dist.all_gather(every, times, group=pipeline.group)
    longest = max(float(each[1]) for each in every)
    return 1.0 - sum(float(each[0]) for each in every) / (pipeline.size * longest)
