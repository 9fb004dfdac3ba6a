"""The one-shot all-reduce of GPUs: what takes it and what does not; its kernel is torch's, played by gloo here."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from armillary.parallel import device_sum as module
from armillary.parallel.collectives import Group, all_reduce
from armillary.parallel.device_sum import DeviceSum, device_sum
from tests.ranks import Ranks

CPU = torch.device("cpu")


def everyone() -> Group:
    group = dist.group.WORLD
    assert group is not None
    return Group(name=group.group_name, size=dist.get_world_size(), rank=dist.get_rank())


def played(
    monkeypatch: pytest.MonkeyPatch, *, wrong_on: int = -1, broken_on: int = -1, fails: bool = False
) -> tuple[Any, list[int]]:
    """What `device_sum` gives where memory is shared and sums are gloo's; and the sizes that went that way."""
    group, sizes = everyone(), list[int]()

    def buffers(group: Group, device: torch.device) -> dict[torch.dtype, torch.Tensor]:
        return {} if group.rank == broken_on else {dtype: torch.empty(5000, dtype=dtype) for dtype in module._DTYPES}

    def one_shot(buffer: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        sizes.append(x.numel())
        if fails:
            raise RuntimeError("no such operation")
        total = all_reduce(x, group)
        return total + 1 if group.rank == wrong_on else total

    monkeypatch.setattr(module, "_can_share", lambda group, device: True)
    monkeypatch.setattr(module, "_shared_buffers", buffers)
    monkeypatch.setattr(module, "_one_shot", one_shot)
    return device_sum(group, CPU, lambda x: all_reduce(x, group)), sizes


def sums() -> list[tuple[float, bool]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduce, sizes = played(monkeypatch)
        assert isinstance(reduce, DeviceSum)
        tensors = [torch.ones(8), torch.ones(6000), torch.ones(7), torch.ones(8, dtype=torch.int64), torch.ones(4, 2).T]
        tensors.append(torch.ones(9)[1:] if dist.get_rank() else torch.ones(8))
        found = []
        for x in tensors:
            sizes.clear()
            found.append((float(reduce(x).sum() / x.numel()), bool(sizes)))
        return found


def test_long_uneven_and_integer_tensors_are_left_to_the_process_group(ranks: Ranks) -> None:
    for found in ranks.run(2, sums):
        assert [total for total, _ in found] == [2.0] * 6
        assert [one_shot for _, one_shot in found] == [True, False, False, False, True, True]


def wrong_or_broken() -> list[bool]:
    found = []
    for case in ({"wrong_on": 1}, {"broken_on": 0}, {"fails": True}, {}):
        with pytest.MonkeyPatch.context() as monkeypatch:
            found.append(played(monkeypatch, **case)[0] is None)
    return found


def test_all_take_the_process_group_where_one_differs_or_cannot(ranks: Ranks) -> None:
    assert ranks.run(2, wrong_or_broken) == [[True, True, True, False]] * 2


def unshared() -> bool:
    """Without a GPU torch shares no memory, as some drivers do not."""
    return not module._shared_buffers(everyone(), CPU)


def test_a_driver_that_shares_no_memory_leaves_sums_to_the_process_group(ranks: Ranks) -> None:
    assert ranks.run(2, unshared) == [True, True]


def reach(gpus: tuple[int, int], peers: bool) -> bool:
    group = everyone()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "all_gather", lambda place, group, dim: torch.stack([own(place, g) for g in gpus]))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: peers)
        return module._can_share(group, CPU)


def own(place: torch.Tensor, gpu: int) -> torch.Tensor:
    return torch.tensor([int(place[0, 0]), gpu])


def test_gpus_share_memory_where_each_rank_has_its_own_and_reaches_the_others(ranks: Ranks) -> None:
    for gpus, peers, expected in (((0, 1), True, True), ((0, 1), False, False), ((0, 0), True, False)):
        assert ranks.run(2, reach, gpus, peers) == [expected] * 2


def on_gpus(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = everyone()
    reduce = device_sum(group, device, lambda x: all_reduce(x, group))
    assert reduce is not None, "these GPUs reach each other"
    x, graph = torch.full((4096,), rank + 1.0, device=device, dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = reduce(x)
    for value in (1.0, 5.0):
        x.fill_(value + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, torch.full_like(total, 2 * value + 1))
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_gpus_sum_inside_a_graph() -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(on_gpus, args=(port,), nprocs=2)  # type: ignore[no-untyped-call]
