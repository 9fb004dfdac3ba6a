"""`armillary bench`: measures, keeps, shows; tables, JSON and quiet; errors in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.cli.bench.tables import shares
from armillary.profiling.ceilings.collective_ranks import Plan, Sample
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, save_peaks
from armillary.training.prepare_data import prepare
from tests.conftest import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def h200() -> Peaks:
    beside = {"spread": 0.02, "sm_clock_hz": 1.98e9, "power_w": 650.0}
    square = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 7.9e14, "beside": beside}
    peaks = new_peaks("NVIDIA H200").with_points("gemm", [square, square | {"k": 4096, "flops": 7.0e14}])
    copy = {"bytes": 1 << 30, "bytes_per_s": 4.2e12, "beside": beside | {"sm_clock_hz": 1.5e9}}
    host = {"direction": "to_host", "pinned": True, "bytes": 1 << 20, "bytes_per_s": 5e10, "beside": beside}
    attention = {"keys": 4096, "head_dim": 128, "dtype": "bf16", "backward": True, "flops": 4e14, "beside": beside}
    return peaks.with_points("copy", [copy]).with_points("host_copy", [host]).with_points("attention", [attention])


def test_measures_keeps_and_shows_again(cli: Cli, home: Home) -> None:
    ran = cli("bench", "ceilings", "--quick", "--device", "cpu", "--only", "launch")
    assert ran.code == 0 and "starting an operation" in ran.out and "eager" in ran.out
    assert "kept in" in ran.out and len(list(home.peaks.glob("*.json"))) == 1
    shown = cli("bench", "ceilings", "--device", "cpu", "--show")
    assert shown.code == 0 and "eager" in shown.out and "kept in" not in shown.out


def test_json_and_quiet(cli: Cli, home: Home) -> None:
    answer = cli("bench", "ceilings", "--quick", "--device", "cpu", "--only", "launch", "--json").json
    (point,) = answer["points"]["launch"]
    assert point["mode"] == "eager" and point["seconds"] > 0 and "date" in point["beside"]
    assert answer["of_catalogue"] == {}, "no peaks of a CPU are known"
    quiet = cli("bench", "ceilings", "--device", "cpu", "--show", "-q").out.split()
    assert quiet == ["launch", "eager", f"{point['seconds']:.4g}"]


def test_nothing_measured_yet(cli: Cli) -> None:
    ran = cli("bench", "ceilings", "--device", "cpu", "--show")
    assert ran.code == 2 and "yet; run armillary bench ceilings" in ran.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ceilings", "--only", "gem"], "did you mean gemm"),
        (["ceilings", "--folder", "/nowhere"], "no folder /nowhere"),
        (["ceilings", "--device", "cuda:99"], "there is no cuda:99"),
        (["collectives", "--world", "1"], "nobody to talk to"),
        (["collectives", "--op", "allreduce"], "did you mean all_reduce"),
        (["collectives", "--size", "4MiB"], "two sizes"),
        (["loader", "/nowhere"], "/nowhere"),
        (["loader", "--workers", "-1"], "fewer than no workers"),
        (["loder"], "did you mean armillary bench loader"),
    ],
)
def test_errors_are_one_line(cli: Cli, words: list[str], expected: str) -> None:
    device = [] if "--device" in words or words == ["loder"] else ["--device", "cpu"]
    ran = cli("bench", *words, *device)
    assert ran.code == 2 and expected in ran.err and ran.err.count("\n") == 1, ran.err


def test_figures_stand_beside_the_catalogue(h200: Peaks, capsys: pytest.CaptureFixture[str]) -> None:
    from armillary.cli.bench.tables import show_peaks
    from armillary.cli.output import Output

    found = shares(h200)
    assert found["gemm"]["bf16"] == pytest.approx(7.9e14 / 989.4e12)
    assert found["copy"]["memory"] == pytest.approx(4.2e12 / 4.8e12)
    show_peaks(Output(), h200)
    text = capsys.readouterr().out
    assert "catalogue: H200 SXM" in text and "79.8%" in text and "87.5%" in text
    assert "790 T ±1.0%" in text and "sm clock 1500 MHz to 1980 MHz" in text and "power 650 W" in text
    assert "causal attention" in text and "backward" in text and "40.4%" in text
    assert "pinned" in text and max(map(len, text.splitlines())) <= 100


def test_what_was_stored_is_not_lost_by_a_new_measurement(cli: Cli, home: Home) -> None:
    import torch

    from armillary.machine.device_name import device_name

    name = device_name("cpu", threads=torch.get_num_threads())
    save_peaks(home, new_peaks(name).with_points("copy", [{"bytes": 64, "bytes_per_s": 1e9}]))
    cli("bench", "ceilings", "--quick", "--device", "cpu", "--only", "launch")
    shown = cli("bench", "ceilings", "--device", "cpu", "--show", "--json").json
    assert set(shown["points"]) == {"copy", "launch"}


def test_collectives(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(plan: Plan) -> list[Sample]:
        pairs = [(op, size) for op in plan.ops for size in plan.sizes]
        return [Sample(op=op, bytes=size, seconds=1e-4 + size / 1e9, spread=0.1, samples=9) for op, size in pairs]

    monkeypatch.setattr("armillary.profiling.ceilings.collectives.run_ranks", made_up)
    ran = cli(
        "bench",
        "collectives",
        "--device",
        "cpu",
        "--world",
        "2",
        "--op",
        "broadcast",
        "--quick",
        "--size",
        "1KiB",
        "--size",
        "64KiB",
    )
    assert ran.code == 0 and "time = latency + bytes / bandwidth" in ran.out and "broadcast" in ran.out
    assert "65.5 kB" in ran.out and "100 µs" in ran.out and "1.00 GB/s" in ran.out


def test_loader(cli: Cli, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 40)
    folder = prepare(str(tmp_path / "*.txt"), tmp_path / "shards", vocab=300).folder
    words = ("bench", "loader", str(folder), "--device", "cpu", "--quick", "--sequence", "16", "--batch", "4")
    ran = cli(*words, "--workers", "0")
    assert ran.code == 0 and "plain mmap" in ran.out and "best: 0 workers" in ran.out
    points = cli("bench", "ceilings", "--show", "--device", "cpu", "--json").json["points"]["loader"]
    assert {point["path"] for point in points} == {"plain mmap", "batches", "loader"}
    assert all(point["tokens"] == 64 and point["beside"]["tokens_per_s"] > 0 for point in points)


def test_a_busy_cpu_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.machine.cores.BackgroundLoad.cores", lambda self: 1.5)
    ran = cli("bench", "ceilings", "--quick", "--device", "cpu", "--only", "launch", "--json")
    assert "other work kept 1.5 cores busy" in ran.err and ran.json["about"]["other_cores"] == 1.5


def test_an_engine_that_does_not_start_is_no_reason_to_stop(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from armillary.cli.bench.bench import measure_engine
    from armillary.cli.output import Output
    from armillary.errors import ArmillaryError

    def fails(home: Home, limit_s: float) -> None:
        raise ArmillaryError("it did not answer")

    monkeypatch.setattr("armillary.planning.calibrate.engine_calibration.calibrate", fails)
    measure_engine(Output("human"), home, 1.0)
    assert "plans for this CPU are rough: it did not answer" in "".join(capsys.readouterr())
    measure_engine(Output("human"), home, -35.0)
    assert "the time for measuring was over; armillary bench ceilings times them" in "".join(capsys.readouterr())
