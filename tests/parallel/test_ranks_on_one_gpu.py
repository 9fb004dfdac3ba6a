"""Ranks that share one GPU train as one process does there: the CUDA paths of every strategy, over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.gpu_through_host import through_host
from tests.ranks import Ranks
from tests.ranks_on_gpus import BARS, line, measure, rows_on

ROWS = [(world, name) for world in (2, 4) for name in rows_on(world)]


def measured(strategy: str, world: int) -> dict[str, float]:
    torch.cuda.set_device(0)
    with through_host():
        return measure(strategy, world, "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "strategy"), ROWS, ids=[f"{name} on {world}" for world, name in ROWS])
def test_a_strategy_on_ranks_that_share_a_gpu(ranks: Ranks, world: int, strategy: str) -> None:
    found = ranks.run(world, measured, strategy, world, timeout_s=120)[0]
    print(line(strategy, world, found, f"gloo, ranks share one {torch.cuda.get_device_name(0)}"))
    assert all(found[precision] <= bar for precision, bar in BARS.items()), found


# --- without a GPU


def through_the_host_of_a_cpu(strategies: list[str]) -> list[tuple[dict[str, float], int]]:
    """The difference from one process, and the messages that went through the host."""
    found = []
    for strategy in strategies:
        with through_host("cpu") as carried:
            found.append((measure(strategy, 2, "cpu", ("fp32",)), len(carried)))
        assert dist.isend is dist.distributed_c10d.isend
    return found


def test_messages_through_the_host_are_what_was_sent(ranks: Ranks) -> None:
    """Pipeline stages and ring attention on CPU ranks, with every message copied as one of a GPU would be."""
    strategies = ["pp (1F1B)", "pp (interleaved)", "cp"]
    for found, messages in ranks.run(2, through_the_host_of_a_cpu, strategies)[0]:
        assert found["fp32"] <= BARS["fp32"] and messages > 10


def test_rows_name_what_they_ran_on_and_what_failed() -> None:
    good = line("DDP", 2, {"fp32": 1e-8, "bf16": 2e-4}, "NCCL, H200")
    assert good == "| DDP | 2 | 1.0e-08 | 2.0e-04 | yes | NCCL, H200 |"
    assert "| no |" in line("DDP", 2, {"fp32": 1e-8, "bf16": float("nan")}, "NCCL, H200")
    assert "no: out of memory" in line("DDP", 2, "out of memory", "")
    assert len(ROWS) > 20
