"""The all-reduce through shared memory: the same sums and bits on every rank, and an end where a rank ends."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from armillary.parallel import shared_sum
from armillary.parallel.collectives import Group, all_reduce
from armillary.parallel.shared_sum import RankLost, SharedSum, sum_over
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]
SIZES = ((1,), (3, 7), (64, 1024), (200_001,))  # the last takes several parts
CPU = torch.device("cpu")


def everyone() -> Group:
    group = dist.group.WORLD
    assert group is not None
    return Group(name=group.group_name, size=dist.get_world_size(), rank=dist.get_rank())


def part(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    x.view(-1)[0] = float("inf") if rank else 1.0
    return x


def sums() -> list[torch.Tensor]:
    group = everyone()
    reduce = sum_over(group, CPU)
    assert isinstance(reduce, SharedSum)
    made = [reduce(part(shape, dtype, group.rank)) for shape in SIZES for dtype in (torch.float32, torch.bfloat16)]
    for number in range(300):  # quick ones after slow ones: no part is overwritten before it is read
        assert reduce(torch.full((5,), float(number + group.rank)))[0] == sum(number + r for r in range(group.size))
    turned = part((6, 4), torch.float32, group.rank).T
    assert torch.equal(reduce(turned), reduce(turned.contiguous()))
    counts = torch.tensor([group.rank + 1])
    assert torch.equal(reduce(counts), all_reduce(counts, group))
    return made


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_the_sum_in_the_order_of_ranks_on_every_rank(ranks: Ranks, size: int) -> None:
    found = ranks.run(size, sums)
    expected = []
    for shape in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            total = part(shape, dtype, 0).float()
            for rank in range(1, size):
                total = total + part(shape, dtype, rank).float()
            expected.append(total.to(dtype))
    for made in found:
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def without_kernels_on_the_last() -> float:
    group, kernels = everyone(), shared_sum.library
    if group.rank == group.size - 1:
        shared_sum.library = lambda: None
    reduce = sum_over(group, CPU)
    shared_sum.library = kernels
    assert not isinstance(reduce, SharedSum)
    return float(reduce(torch.tensor([group.rank + 1.0])))


def test_all_take_the_process_group_where_one_has_to(ranks: Ranks) -> None:
    assert ranks.run(2, without_kernels_on_the_last) == [3.0, 3.0]


def test_a_rank_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sum, "_PATIENCE_S", 0.01)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while shared_sum._alive(ended.pid):  # until it is a zombie, which nobody has waited for
        pass
    memory = mmap.mmap(-1, 2 * (64 + 2 * shared_sum._PART_BYTES))
    reduce = SharedSum((memory, [0, ended.pid]), Group(name="", size=2, rank=0), lambda x: x)
    with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
        reduce(torch.ones(3))
    assert ended.wait() == 0 and not shared_sum._alive(ended.pid)
