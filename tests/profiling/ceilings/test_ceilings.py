"""Ceilings: cases, random data, points as peaks are kept, limits that hold. No test looks at a speed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from armillary.engine.runner.linear.linear_formats import int_mm_is_exact
from armillary.errors import NotFound
from armillary.kernels.core.random_inputs import Pool, random_row, set_elements
from armillary.machine.cores import BackgroundLoad
from armillary.machine.device_name import device_name
from armillary.profiling.ceilings import attention_flops as attention
from armillary.profiling.ceilings import bandwidth, disk, elementwise, fma, gemm, host_copy
from armillary.profiling.ceilings import launch_latency as launch
from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of
from armillary.profiling.ceilings.settings import Settings, cache_bytes
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, new_peaks, save_peaks

CPU = torch.device("cpu")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A small device that is looked at for a moment."""
    return Settings(device=CPU, quick=True, budget_s=1e-4, folder=tmp_path, cache_bytes=1 << 20, free_bytes=24e6)


# --- random data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_rows_are_random_and_never_zeros(dtype: torch.dtype) -> None:
    row = random_row(5_000_000, dtype, CPU)
    assert row.dtype == dtype and row.numel() == 5_000_000
    assert row[:1000].unique().numel() > 100 and float((row == 0).float().mean()) < 0.02
    assert float(row[-100_000:].float().std()) > 0.5
    assert torch.equal(row, random_row(5_000_000, dtype, CPU)), "the same for the same seed"


def test_buffers_of_a_set_do_not_overlap_and_sets_come_round() -> None:
    shapes = [(10, 7), (3, 50)]
    row = random_row(2 * set_elements(shapes) + 5, torch.float32, CPU)
    (a, b), (c, d), (e, _) = Pool(row).sets(3, shapes)
    places = [set(range(x.storage_offset(), x.storage_offset() + x.numel())) for x in (a, b, c, d)]
    assert len(set().union(*places)) == sum(map(len, places)) == 2 * (70 + 150)
    assert e.data_ptr() == a.data_ptr() and all(x.storage_offset() % 64 == 0 for x in (a, b, c, d))


# --- bandwidth


def test_memory_sets_go_well_past_the_cache_and_cache_sets_stay_in_it(settings: Settings) -> None:
    large = replace(settings, free_bytes=64e9, cache_bytes=300 << 20, quick=False)
    cases = bandwidth.cases(large)
    assert {case["op"] for case in cases} == {"copy", "read", "write", "triad"}
    assert max(case["bytes"] for case in cases if not case["hot"]) >= 3 * large.cache_bytes
    assert all(case["bytes"] <= large.cache_bytes / 2 for case in cases if case["hot"])
    assert len({case["bytes"] for case in cases if not case["hot"]}) == 5


def test_a_small_memory_is_not_filled(settings: Settings) -> None:
    assert max(case["bytes"] for case in bandwidth.cases(settings)) <= settings.free_bytes / 3


def test_bandwidth_points(settings: Settings) -> None:
    points = list(bandwidth.measure(bandwidth.cases(settings), settings))
    assert {kind for kind, _ in points} == {"copy", "read", "write", "triad", "cache"}
    for kind, point in points:
        assert point["bytes_per_s"] > 0 and {"spread", "samples", "date", "buffers"} <= set(point["beside"])
        assert kind != "cache" or point["beside"]["buffers"] == 1
    smallest = next(point for kind, point in points if kind == "read")
    assert smallest["beside"]["buffers"] > 1, "small sets are taken in turn"


def test_the_operations_do_what_they_say() -> None:
    a, b, c = (torch.randn(64) for _ in range(3))
    bandwidth.OPS["triad"][1](a, b, c)
    assert torch.allclose(a, b + 0.37 * c)
    bandwidth.OPS["copy"][1](a, b)
    assert torch.equal(a, b)
    bandwidth.OPS["write"][1](c)
    assert c.unique().numel() == 1 and c[0] != 0


# --- matrix products


def test_every_dtype_is_tried_on_squares_and_model_shapes(settings: Settings) -> None:
    cases = gemm.cases(replace(settings, quick=False))
    assert {case["dtype"] for case in cases} == {"fp32", "bf16", "fp16", "int8"}
    assert {"m": 2048, "n": 2048, "k": 2048, "dtype": "bf16"} in cases
    assert {"m": 1024, "n": 768, "k": 3072, "dtype": "fp32"} in cases


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_the_product_is_of_random_matrices_and_right(settings: Settings, dtype: str, monkeypatch: Any) -> None:
    seen = []
    real = gemm._CALLS.get(dtype, gemm._plain)
    monkeypatch.setitem(gemm._CALLS, dtype, lambda a, b: seen.append((a, b)) or real(a, b))
    call, *others = gemm.make_calls({"m": 32, "n": 48, "k": 64, "dtype": dtype}, settings)
    (a, b), *_ = seen
    if dtype == "int8" and not int_mm_is_exact():
        pytest.skip("int8 GEMMs saturate on this CPU: it has no VNNI")
    expected = a.double() @ (b.double().t() if dtype == "int8" else b.double())
    assert expected.norm() > 0 and others, "several sets, none of zeros"
    assert (call().double() - expected).norm() / expected.norm() < {"fp32": 1e-5, "int8": 1e-12}.get(dtype, 1e-2)


def test_gemm_points(settings: Settings) -> None:
    case = {"m": 32, "n": 32, "k": 32, "dtype": "fp32"}
    ((kind, point),) = gemm.measure([case], settings)
    assert kind == "gemm" and point["flops"] > 0 and case.items() <= point.items()


def test_an_emulated_dtype_is_given_up_before_it_takes_minutes(settings: Settings) -> None:
    small = {"m": 16, "n": 16, "k": 16, "dtype": "fp32"}
    huge = small | {"m": 1 << 30, "n": 1 << 30}
    assert [point["m"] for _, point in gemm.measure([small, huge], settings)] == [16]


# --- launches, copies, disk


def test_launch_fma_and_host_copies_of_a_cpu(settings: Settings) -> None:
    ((kind, point),) = launch.measure(launch.cases(settings), settings)
    assert (kind, point["mode"]) == ("launch", "eager") and point["seconds"] > 0
    assert fma.cases(settings) == [] and host_copy.cases(settings) == []


def test_disk_points_leave_nothing_behind(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case | {"bytes": 8 << 20} for case in disk.cases(settings)]
    points = [point for _, point in disk.measure(cases, settings)]
    assert {(p["op"], p["threads"]) for p in points} >= {("read", 1), ("write", 1), ("random_read", 16)}
    assert all(p["bytes_per_s"] > 0 and p["beside"]["page_cache"] for p in points)
    assert list(settings.folder.iterdir()) == []


def test_a_file_system_without_direct_access_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.O_DIRECT", 0, raising=False)
    cases = [case | {"bytes": 8 << 20} for case in disk.cases(settings) if case["op"] == "read"][:1]
    ((_, point),) = disk.measure(cases, settings)
    assert point["beside"]["page_cache"] == "dropped before"
    monkeypatch.delattr("os.posix_fadvise", raising=False)
    ((_, point),) = disk.measure(cases, settings)
    assert point["beside"]["page_cache"] == "not avoided"


def test_a_full_disk_is_left_alone(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert disk.cases(settings) == []


# --- all together


def test_measured_stored_and_measured_again(tmp_path: Path, home: Home) -> None:
    found = measure_ceilings(CPU, quick=True, folder=tmp_path, only=["launch"])
    save_peaks(home, found.peaks)
    again = measure_ceilings(CPU, quick=True, folder=tmp_path, only=["launch"])
    saved = save_peaks(home, again.peaks)
    assert saved == load_peaks(home, name_of(CPU))
    assert len(saved.points["launch"]) == 1, "the newer point replaces the older"
    assert saved.points["launch"] == again.peaks.points["launch"]
    assert saved.about["torch"] == torch.__version__


def test_what_time_did_not_allow_is_counted(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    found = measure_ceilings(
        CPU, quick=True, folder=tmp_path, only=["launch"], limit_s=1e-9, watch=lambda *state: told.append(state)
    )
    assert found.skipped == 1 and not found.peaks.points
    assert told[-1] == (1, 1, "launch")


def test_a_section_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no section 'gem'; did you mean gemm"):
        measure_ceilings(CPU, only=["gem"], folder=tmp_path)


def test_names_of_devices() -> None:
    assert device_name("cpu", threads=1).endswith(", 1 thread")
    assert device_name(CPU, threads=4).endswith(", 4 threads")
    assert device_name("cpu", threads=torch.get_num_threads()) == name_of(CPU), "as kernel choices name a CPU"
    assert new_peaks(device_name()).device == device_name(CPU)


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    assert cache_bytes(CPU, tmp_path) == 32 << 20, "nobody says"
    for index, size in enumerate(("48K", "2048K", "30M")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert cache_bytes(CPU, tmp_path) == 30 << 20


def test_the_work_of_others_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"user": 1.0, "nice": 0.0, "system": 1.0}
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(**times))
    background = BackgroundLoad()
    times["user"] = 999_999.0
    busy = background.cores()
    assert busy is not None and busy > 1
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert BackgroundLoad().cores() is None


def test_plain_passes_are_measured_where_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm 28 bytes forward and 96 backward an element and a cast each way, and so on for the others."""
    settings = Settings(device=torch.device("cpu"), budget_s=0.01, quick=True)
    monkeypatch.setattr(elementwise, "is_emulated", lambda dtype, settings: False)
    assert [case["dtype"] for case in elementwise.cases(settings)] == ["fp32", "bf16"]
    monkeypatch.setattr(elementwise, "is_emulated", lambda dtype, settings: dtype == "bf16")
    cases = elementwise.cases(settings)
    assert [case["dtype"] for case in cases] == ["fp32"]
    ((kind, point),) = elementwise.measure(cases, settings)
    assert kind == "passes" and point["bytes_per_s"] > 0
    assert elementwise.moved_bytes("fp32", 2) == 2 * (512 * 124 + 1024 * 22 * 4 + 2048 * 32)


def test_attention_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs that the mask leaves count; five products backward against two forward."""
    monkeypatch.setattr(attention, "_ROWS", 2)
    settings = Settings(device=torch.device("cpu"), budget_s=0.01, quick=True)
    tried = attention.cases(settings)
    assert all(len({case[name] for case in tried}) > 1 for name in ("keys", "head_dim")), "a processor minds both"
    shape = {"keys": 64, "heads": 2, "head_dim": 8, "dtype": "bf16"}
    cases = [shape | {"backward": backward} for backward in (False, True)]
    kinds, points = zip(*attention.measure(cases, settings), strict=True)
    assert set(kinds) == {"attention"} and all(point["flops"] > 0 for point in points)
    forward, backward = (attention.counted_flops(64, 2, 8, backward=one) for one in (False, True))
    assert forward == 2 * 2 * 2 * 2 * 8 * 64 * 65 / 2 and backward == 2.5 * forward
