"""What cutting a model by tensor parallelism leaves on a rank, and what it keeps for the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from armillary.model.transformer import build
from armillary.parallel.collectives import Group, gather
from armillary.parallel.mesh import make_mesh
from armillary.parallel.tensor import apply_tensor_parallel, regathering
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.tables.train import TrainJob
from armillary.training.parity.case import Case, shard_model, tiny, train_step
from tests.ranks import Ranks


def shapes() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(whole, on this rank) of every parameter."""
    model = build(tiny(kv_heads=4, mlp_bias=True, sinks=True, qk_norm="head"), dtype=torch.float32, device="meta")
    with join_world("cpu") as world:
        apply_tensor_parallel(model, make_mesh(Layout(tp=4), world).along("tp"), shard_tokens=True)
    found = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in found.values())
    return {name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in found.items()}


def test_every_parameter_keeps_its_name_and_its_whole_shape(ranks: Ranks) -> None:
    on_ranks = ranks.run(4, shapes)
    block, first = "blocks.1.", on_ranks[0]
    assert first[f"{block}attention.qkv.weight"] == ((64, 16), (16, 16))  # a KV head with its two queries
    assert first[f"{block}attention.out.weight"] == ((16, 32), (16, 8))
    assert first[f"{block}attention.sinks_N"] == ((8,), (2,))
    assert first[f"{block}attention.q_norm.weight"] == ((4,), (4,))
    assert first[f"{block}mlp.up.bias"] == ((48,), (12,))
    assert first[f"{block}mlp.down.bias"] == ((16,), (16,))
    assert [shape["embedding.weight"][1] for shape in on_ranks] == [(10, 16), (10, 16), (10, 16), (7, 16)]


def kept(again: bool) -> tuple[bool, Tensor, Tensor]:
    """(whether the gathered tokens still exist before the backward pass, gradients of weight and tokens)."""
    with join_world("cpu") as world:
        group = Group.of(make_mesh(Layout(tp=2), world).along("tp"))
    weight = torch.ones(3, 4, requires_grad=True)
    x = (torch.arange(8.0).view(1, 2, 4) + 10 * group.rank).requires_grad_()
    whole = gather(x, group, dim=1)
    storage = StorageWeakRef(whole.untyped_storage())
    if again:
        with regathering(x, whole, group):
            out = F.linear(whole, weight)
    else:
        out = F.linear(whole, weight)
    del whole
    exists = not storage.expired()
    out.square().sum().backward()
    assert weight.grad is not None and x.grad is not None
    return exists, weight.grad, x.grad


def test_gathered_tokens_are_not_kept_but_gathered_again(ranks: Ranks) -> None:
    for (dear, *wanted), (thrifty, *found) in zip(ranks.run(2, kept, False), ranks.run(2, kept, True), strict=True):
        assert dear and not thrifty
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Told:
    """A clock that counts."""

    def __init__(self) -> None:
        self.open, self.closed = 0, 0

    def mark(self) -> int:
        self.open += 1
        return self.open

    def until_now(self, begin: int) -> None:
        assert begin == self.open
        self.closed += 1


def told(shard_tokens: bool) -> tuple[int, int]:
    """Exchanges of one step of two layers, as they begin and as they end."""
    layout = Layout(tp=2, precision="fp32", sequence_parallel=shard_tokens)
    with join_world("cpu") as world:
        case, clock = Case(layout=layout), Told()
        sharded = shard_model(case, TrainJob(seed=1), world)
        sharded.add_timer(clock)
        train_step(sharded, case, 0)
    return clock.open, clock.closed


def test_exchanges_are_told_to_a_clock(ranks: Ranks) -> None:
    """A layer has two forward and two back, twice as many where tokens are cut, which then are gathered once more for
    both its products; the loss a maximum, a sum and the gradient of what it read, and the reading where that is cut."""
    whole, cut = 2 * 4 + 1 + 3, 2 * (8 + 2) + 2 + 4
    assert ranks.run(2, told, False) == [(whole, whole)] * 2
    assert ranks.run(2, told, True) == [(cut, cut)] * 2
