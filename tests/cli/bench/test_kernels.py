"""`armillary bench kernels`: table, JSON, quiet, a page; errors in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.kernels.core import requirements as needs
from armillary.profiling.kernel_bench import bench as kernel_bench
from armillary.profiling.kernel_bench.results import KernelBench, KernelRow
from tests.conftest import Ran

Cli = Callable[..., Ran]
WORDS = ("bench", "kernels", "--quick", "--device", "cpu", "--op", "activate")


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.NEEDS, "compile", lambda device: "no compiler")


@pytest.mark.slow
def test_a_table_and_a_page(cli: Cli, tmp_path: Path) -> None:
    ran = cli(*WORDS, "--plot", str(tmp_path / "bars.html"))
    assert ran.code == 0 and "activate" in ran.out and "ceilings of this run: copy" in ran.out
    assert "eager" in ran.out and "bars.html" in ran.out
    assert "<svg" in (tmp_path / "bars.html").read_text()


def test_json(cli: Cli) -> None:
    (row,) = cli(*WORDS, "--json").json["rows"]
    assert row["chosen"] == "eager" and {one["version"] for one in row["measured"]} >= {"triton", "compile", "eager"}


def test_quiet(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    row = KernelRow(op="rope", name="llama-3-8b", shape="", ceiling="copy", chosen="triton", measured=())
    found = KernelBench(device="x", date="", ceilings={}, rows=(row,), skipped=3, warm_s=0.0, seconds=1.0)
    monkeypatch.setattr(kernel_bench, "bench_kernels", lambda *args, **kwargs: found)
    ran = cli(*WORDS, "-q")
    assert ran.out.strip() == "rope\tllama-3-8b\ttriton" and "3 cases were left out" in ran.err


def test_an_unknown_op(cli: Cli) -> None:
    ran = cli("bench", "kernels", "--device", "cpu", "--op", "linear_crossentropy")
    assert ran.code == 2 and "did you mean linear_cross_entropy" in ran.err


def test_a_page_is_no_picture(cli: Cli) -> None:
    ran = cli(*WORDS, "--plot", "bars.png")
    assert ran.code == 2 and ran.err.strip().endswith("try --plot bars.html")
