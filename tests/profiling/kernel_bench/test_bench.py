"""The kernel bench: rows with shares of ceilings measured in the same run, the winner named, a page of bars."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.errors import NotFound
from armillary.kernels.core import requirements as needs
from armillary.kernels.core.op import OPS, find_op
from armillary.kernels.loss.linear_cross_entropy import LinearCrossEntropyCase
from armillary.kernels.norm.norm import NormCase
from armillary.machine.device_name import device_name
from armillary.profiling.kernel_bench.bench import _in_turn, bench_kernels
from armillary.profiling.kernel_bench.report import bench_page
from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured
from armillary.profiling.kernel_bench.targets import target_of
from armillary.store.home import Home
from armillary.store.kernel_choices import load_choices

CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes seconds a kernel; not here."""
    monkeypatch.setitem(needs.NEEDS, "compile", lambda device: "no compiler")


def test_each_version_has_its_share_of_the_ceiling(no_compiler: None, home: Home) -> None:
    seen: list[tuple[int, int, str]] = []
    found = bench_kernels(CPU, ops=["norm"], quick=True, home=home, watch=lambda *now: seen.append(now))
    (row,) = found.rows
    assert row.op == "norm" and row.name == "llama-3-8b" and "4096" in row.shape
    eager = row.of("eager")
    assert eager is not None and eager.forward_rate and eager.forward_share
    assert eager.forward_share == pytest.approx(eager.forward_rate / found.ceilings["copy"])
    compiled = row.of("compile")
    assert compiled is not None and compiled.refused == "no compiler" and compiled.seconds is None
    assert row.chosen in ("eager", "torch") and found.skipped == 0
    assert seen[0][:2] == (0, 1) and seen[-1][:2] == (1, 1)
    assert len(load_choices(home, device_name("cpu", threads=torch.get_num_threads()))) == 1, "what wins is remembered"


def test_cases_beyond_the_limit_are_counted(no_compiler: None) -> None:
    found = bench_kernels(CPU, ops=["norm", "rope"], quick=True, limit_s=0.0)
    assert found.rows == () and found.skipped == 2


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(NotFound, match="did you mean rope"):
        bench_kernels(CPU, ops=["roqe"])


@pytest.fixture
def bench() -> KernelBench:
    ours = Measured(
        version="triton",
        forward_s=1e-3,
        backward_s=2e-3,
        forward_rate=4e12,
        backward_rate=3e12,
        forward_share=0.95,
        backward_share=0.9,
        error=1e-3,
    )
    other = replace(ours, version="compile", forward_s=2e-3, forward_share=0.5)
    out = Measured(version="liger", refused="liger_kernel is not installed")
    row = KernelRow(
        op="norm", name="a <model>", shape="8 × 8 bf16", ceiling="copy", chosen="triton", measured=(ours, other, out)
    )
    return KernelBench(
        device="NVIDIA H200",
        date="2026-11-15",
        ceilings={"copy": 4.2e12},
        rows=(row,),
        skipped=0,
        warm_s=1.0,
        seconds=2.0,
    )


def test_a_page_of_bars(bench: KernelBench) -> None:
    page = bench_page(bench)
    assert "a &lt;model&gt;: 8 × 8 bf16" in page and "<model>" not in page
    wide = page.split("on-wide'")[1].split("on-narrow'")[0]
    assert wide.count("<rect") == 4, "forward and backward of two versions; what was not timed has no bar"
    assert "95% · 4 TB/s" in page.replace("4.00", "4") and "class='bold'>triton" in page


def test_our_own_kernel_is_the_best_in_triton(bench: KernelBench) -> None:
    (row,) = bench.rows
    slower = replace(row.measured[0], version="triton, split", forward_s=1.0)
    assert replace(row, measured=(slower, *row.measured)).ours == row.measured[0]
    assert replace(row, measured=row.measured[1:]).ours is None


def test_every_op_says_what_it_moves() -> None:
    """Each op of the list loads without triton, has cases, and work for each of them."""
    for name, op in ((name, find_op(name)) for name in OPS):
        assert op.name == name and op.cases
        for case in op.cases.values():
            work = op.work(case)
            assert work.flops + work.bytes > 0 and bool(op.grads) == bool(work.backward_bytes + work.backward_flops)


def test_ops_take_turns_so_that_none_goes_without() -> None:
    norm, rope = (list(find_op(name).cases.items())[:3] for name in ("norm", "rope"))
    by_op = [[(find_op("norm"), *one) for one in norm], [(find_op("rope"), *one) for one in rope[:1]]]
    assert [(op.name, name) for op, name, _ in _in_turn(by_op)] == [
        ("norm", norm[0][0]),
        ("rope", rope[0][0]),
        ("norm", norm[1][0]),
        ("norm", norm[2][0]),
    ]


def test_a_bar_is_held_or_what_is_missed_is_said(bench: KernelBench) -> None:
    bar = target_of("norm", NormCase(rows=8192, columns=4096))
    assert bar is not None and bar.text == "≥ 90/85%, never behind compile, liger"
    row = replace(bench.rows[0], bar=bar)
    assert row.misses(row.ours) == []
    assert row.misses(row.of("compile")) == ["forward 50.0% < 90%"]
    quick = replace(row.measured[1], forward_s=1e-4)
    assert replace(row, measured=(row.measured[0], quick)).misses(row.ours) == ["behind compile"]
    half = replace(row.measured[1], forward_s=row.measured[0].forward_s / 2, backward_s=1.0)
    assert replace(row, measured=(row.measured[0], half)).misses(row.ours) == ["forward behind compile"]
    assert row.misses(None) == ["not timed"] and bench.rows[0].misses(None) == []


def test_memory_has_a_bar(bench: KernelBench) -> None:
    bar = target_of("linear_cross_entropy", LinearCrossEntropyCase(tokens=8192, hidden=4096, vocab=131072))
    assert bar is not None and bar.extra_bytes == 1.5e9
    row = replace(bench.rows[0], bar=bar)
    assert row.misses(replace(row.measured[0], extra_bytes=1.2e9)) == []
    assert row.misses(replace(row.measured[0], extra_bytes=2e9)) == ["2.00 GB extra > 1.5"]


def test_every_bar_has_a_case_in_the_bench() -> None:
    barred = {op.name for op in map(find_op, OPS) if any(target_of(op.name, case) for case in op.cases.values())}
    assert barred == {
        "norm",
        "add_norm",
        "rope",
        "activate",
        "linear_cross_entropy",
        "attention",
        "paged_attention",
        "latent_decode",
        "small_linear",
        "fp8_matmul",
    }
    tokens = {case.tokens for case in find_op("small_linear").cases.values() if target_of("small_linear", case)}
    assert tokens == {1, 8, 32}
    contexts = {
        (case.batch, case.context)
        for case in find_op("paged_attention").cases.values()
        if target_of("paged_attention", case)
    }
    assert {(256, 1024), (256, 8192), (1, 32768)} <= contexts


def test_what_is_done_is_kept_as_it_goes(no_compiler: None) -> None:
    kept: list[KernelBench] = []
    bench_kernels(CPU, ops=["norm", "rope"], quick=True, save=kept.append)
    assert [len(bench.rows) for bench in kept] == [1, 2] and kept[0].left == ("rope llama-3-8b",)
