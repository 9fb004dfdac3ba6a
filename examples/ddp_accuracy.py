"""Time to a target accuracy: a small CNN on one rank, on two with the same batch, and on two with twice the batch.

Seconds of a step say how fast images go by; how many steps are needed depends on the batch. Both together are what a
user waits for. Rank 0 alone is measured while rank 1 waits, so that all three run on the same pinned core.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import digits
from exercise import table
from precision_training import cnn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from armillary.parallel.world import World
from armillary.units import seconds_text

IMAGES, TEST, WIDTH = 8192, 500, 16
LR = 0.05


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is trained to, and how often that is looked at."""

    accuracy: float
    every: int = 4
    most_steps: int = 200


@dataclass(frozen=True, kw_only=True)
class Reached:
    """One training up to the target."""

    ranks: int
    batch: int
    """of all ranks"""
    steps: int
    seconds: float
    """of rank 0, without looking at the accuracy"""
    accuracy: float

    @property
    def images_per_s(self) -> float:
        return self.batch * self.steps / self.seconds


def to_accuracy(target: Target, batch: int, world: World) -> list[Reached] | None:
    """All three; rank 0 returns them."""
    train, test = digits(IMAGES, seed=1), digits(TEST, seed=2)
    found = []
    for ranks, whole in ((1, batch), (world.size, batch), (world.size, batch * world.size)):
        dist.barrier()
        if ranks > 1 or world.is_main:
            found.append(_train(target, whole, ranks, world, train, test))
    dist.barrier()
    return found if world.is_main else None


def _train(
    target: Target, batch: int, ranks: int, world: World, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> Reached:
    """Until the accuracy is reached. Every rank takes its rows of each batch; the all-reduce makes one mean of them."""
    torch.manual_seed(0)
    bare = cnn(WIDTH)
    model: nn.Module = DistributedDataParallel(bare) if ranks > 1 else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    mine, seconds, right, step = batch // ranks, 0.0, 0.0, 0
    while right < target.accuracy and step < target.most_steps:
        begin = time.perf_counter()
        first = (step * batch + (world.rank * mine if ranks > 1 else 0)) % (IMAGES - batch)
        images, labels = (part[first : first + mine] for part in train)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - begin
        step += 1
        if step % target.every == 0:
            right = _accuracy(bare, test, ranks)
    return Reached(ranks=ranks, batch=batch, steps=step, seconds=seconds, accuracy=right)


@torch.no_grad()
def _accuracy(model: nn.Module, test: tuple[Tensor, Tensor], ranks: int) -> float:
    """Of rank 0, whose statistics of the batch norm are a little different: all ranks stop together."""
    model.eval()
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
    model.train()
    if ranks > 1:
        dist.broadcast(right, src=0)
    return float(right)


def accuracy_table(found: list[Reached], target: Target) -> str:
    base = found[0]
    rows = [
        (
            str(each.ranks),
            str(each.batch),
            f"{each.images_per_s:,.0f}",
            str(each.steps) if each.accuracy >= target.accuracy else f"more than {each.steps}",
            seconds_text(each.seconds),
            f"{base.seconds / each.seconds:.2f} ×",
        )
        for each in found
    ]
    return table(("ranks", "batch", "images/s", "steps", f"time to {target.accuracy:.0%}", "against one rank"), rows)
