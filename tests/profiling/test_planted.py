"""Bottlenecks put there on purpose are named: a test each, through a real recording."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from armillary.machine.device_name import device_name
from armillary.profiling.profile import Profile
from armillary.profiling.record.profile_callable import profile
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks
from tests.ranks import Ranks

HERE = Path(__file__).name
FLOPS, BYTES_PER_S = 1e12, 20e9
"""above what one core does, so that the verdict does not hang on the machine of the day"""


@pytest.fixture
def here(tmp_path: Path) -> Home:
    """A home in which this processor has been measured."""
    home = Home.at(tmp_path / "home")
    peaks = new_peaks(device_name("cpu", threads=torch.get_num_threads()))
    gemm = {"m": 1024, "n": 1024, "k": 1024, "dtype": "fp32", "flops": FLOPS}
    peaks = peaks.with_points("gemm", [gemm]).with_points("copy", [{"bytes": 1 << 28, "bytes_per_s": BYTES_PER_S}])
    save_peaks(home, peaks)
    return home


def whole(found: Profile) -> Profile:
    """The budget adds up, and what could not be attributed is small."""
    assert sum(found.budget.values()) == pytest.approx(found.wall_s, rel=0.005)
    assert found.fraction("unknown") <= 0.05, found.budget
    return found


def first(found: Profile) -> str:
    assert found.findings, found.budget
    return found.findings[0].lower()


class Slow(Dataset[torch.Tensor]):
    """Items that take their time."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.randn(64)


@pytest.mark.slow
def test_a_sleeping_loader(here: Home) -> None:
    batches, layer = iter(DataLoader(Slow(), batch_size=2)), nn.Linear(64, 64)
    found = whole(profile(lambda: layer(next(batches)).sum().backward(), steps=3, warmup=1, home=here))
    assert "loader" in first(found)
    assert found.gaps[0].cause == "loader" and HERE in found.gaps[0].where
    assert found.fraction("host") > 0.5


@pytest.mark.slow
def test_an_item_in_the_loop_is_pointed_at(here: Home) -> None:
    x = torch.randn(256, 256)
    found = whole(profile(lambda: sum((x @ x).sum().item() for _ in range(20)), steps=2, warmup=1, home=here))
    assert {"aten::item", "aten::_local_scalar_dense"} & {row.name for row in found.rows}
    assert any("20 times per step" in note and ".item()" in note for note in found.notes), found.notes


@pytest.mark.slow
def test_five_thousand_tiny_operations(here: Home) -> None:
    x = torch.zeros(4)

    def step() -> None:
        for _ in range(5000):
            x.neg_()

    found = whole(profile(step, steps=2, warmup=1, home=here))
    assert any(word in first(found) for word in ("launch", "overhead", "tiny")), found.findings
    assert next(row for row in found.rows if row.name == "aten::neg_").calls == 10_000


@pytest.mark.slow
def test_a_big_gemm(here: Home) -> None:
    a = torch.randn(768, 768)
    found = whole(profile(lambda: a @ a, steps=3, warmup=1, home=here))
    assert "gemm" in first(found) or "aten::mm" in first(found)
    top = found.operators[0]
    assert (top.name, top.work, top.bound) == ("aten::mm", "gemm", "compute")
    assert top.flops == 3 * 2 * 768**3


@pytest.mark.slow
def test_a_memory_bound_chain(here: Home) -> None:
    x = torch.randn(4_000_000)

    def step() -> None:
        y = x
        for _ in range(4):
            y = (y + 1) * 2

    found = whole(profile(step, steps=2, warmup=1, home=here))
    assert "memory" in first(found), found.findings
    assert found.operators[0].bound == "memory"


@pytest.mark.slow
def test_a_thread_that_holds_the_interpreter(here: Home) -> None:
    x = torch.randn(192, 192)

    def step() -> None:
        for _ in range(20):
            torch.mm(x, x)

    with hog():
        found = profile(step, steps=3, warmup=1, home=here)
    assert "gil" in first(found) or "interpreter" in first(found), found.findings
    assert "gil" in {gap.cause for gap in found.gaps[:10]}


@contextmanager
def hog() -> Iterator[None]:
    """A thread that computes in Python all the time."""
    stop = threading.Event()

    def busy() -> None:
        n = 0
        while not stop.is_set():
            n += 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def slow_collective(folder: str) -> dict[str, Any]:
    """Rank 1 comes late to every all-reduce; what rank 0's profile says."""
    x, weights = torch.randn(1000), torch.randn(128, 128)

    def step() -> None:
        torch.mm(weights, weights)
        if dist.get_rank() == 1:
            time.sleep(0.03)
        dist.all_reduce(x)

    found = profile(step, steps=3, warmup=1, home=Home.at(folder))
    return {"findings": found.findings, "comm": found.fraction("comm_exposed"), "unknown": found.fraction("unknown")}


@pytest.mark.slow
def test_a_slow_collective(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(2, slow_collective, str(tmp_path))[0]
    assert any(word in seen["findings"][0] for word in ("collective", "communication", "all_reduce")), seen
    assert seen["comm"] > 0.5 and seen["unknown"] <= 0.05


def training_step() -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(256, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
def test_a_training_step_adds_up(here: Home) -> None:
    found = whole(profile(training_step(), steps=4, warmup=2, home=here))
    assert found.steps == 4
    assert {"gemm", "norm"} <= {row.work for row in found.rows}


# --- on an accelerator


@pytest.mark.gpu
@pytest.mark.slow
def test_an_item_in_the_loop_on_a_gpu(here: Home) -> None:
    x = torch.randn(512, 512, device="cuda")
    found = whole(profile(lambda: [(x @ x).sum().item() for _ in range(50)], steps=3, warmup=2, home=here))
    assert ".item()" in " ".join(found.findings[:2]), found.findings
    assert any(gap.cause == "sync" for gap in found.gaps)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_pageable_copy(here: Home) -> None:
    x, layer = torch.randn(64_000_000), nn.Linear(16, 16, device="cuda")
    found = whole(profile(lambda: layer(x.cuda()[:16]), steps=3, warmup=2, home=here))
    assert "copy" in first(found) or "copies" in first(found), found.findings
    assert "pageable" in first(found) or found.fraction("sync") > 0.5


@pytest.mark.gpu
@pytest.mark.slow
def test_five_thousand_tiny_kernels(here: Home) -> None:
    x = torch.zeros(4, device="cuda")
    found = whole(profile(lambda: [x.add_(1) for _ in range(5000)], steps=2, warmup=1, home=here))
    assert "launch" in first(found), found.findings


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own code and about fp32 products
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_a_training_step_on_a_gpu_adds_up(here: Home, compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)).cuda()
    run, optimizer = torch.compile(model) if compiled else model, torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 1024, device="cuda")

    def step() -> None:
        run(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = whole(profile(step, steps=5, warmup=3, home=here))
    assert "cuda" in found.device.lower() or torch.cuda.get_device_name() in found.device


@pytest.mark.gpu
@pytest.mark.slow
def test_a_graph_of_kernels_adds_up(here: Home) -> None:
    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.mm(x, x)
    with torch.cuda.graph(graph):
        y = x
        for _ in range(50):
            y = torch.relu(y @ x)
    whole(profile(graph.replay, steps=10, warmup=3, home=here))
