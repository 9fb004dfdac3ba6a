"""Gradients of whole copies are summed in buckets, in one order on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.parallel.ddp import Replicas
from tests.ranks import Ranks


def summed(bucket_bytes: int) -> tuple[int, dict[str, Tensor], list[float]]:
    """Buckets, gradients of two backward passes of which the first is not sent, and gradients in between."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    names = ("first", "second", "frozen", "one_rank_only")
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    model["frozen"].requires_grad_(False)
    replicas = Replicas(model.parameters(), group, bucket_bytes=bucket_bytes)
    used = ["first", "second", "frozen"] + (["one_rank_only"] if rank == 1 else [])
    between = []
    for last in (False, True):
        if last:
            replicas.arm()
        x = torch.full((1, 3), float(rank + 1))
        torch.stack([model[name](x).sum() for name in used]).sum().backward()
        between.append(float(model["first"].weight.grad[0, 0]))
    replicas.finish()
    return len(replicas.buckets), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, between


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 3), (72, 2), (10_000, 1)])
def test_gradients_are_summed_and_travel_on_the_last_pass_only(ranks: Ranks, bucket_bytes: int, buckets: int) -> None:
    for rank, (number, gradients, between) in enumerate(ranks.run(2, summed, bucket_bytes)):
        assert number == buckets
        assert between[0] == rank + 1  # its own, not yet anybody else's
        assert {name: float(gradient.mean()) for name, gradient in gradients.items()} == {
            "first.weight": 2 * (1 + 2),
            "second.weight": 2 * (1 + 2),
            "one_rank_only.weight": 2 * 2,
        }
