"""Measured ceilings of a device."""

from __future__ import annotations

import json

import pytest

from armillary.errors import BadData, BadInput
from armillary.store.home import Home
from armillary.store.peaks import Peaks, load_peaks, new_peaks, peaks_path, save_peaks

GEMMS = [
    {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "flops": 7.0e14},
    {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 7.4e14},
    {"m": 8192, "n": 8192, "k": 8192, "dtype": "fp32", "flops": 5.0e13},
]
COPIES = [{"bytes": 1 << 30, "bytes_per_s": 4.1e12}, {"bytes": 1 << 20, "bytes_per_s": 1.2e12}]


@pytest.fixture
def h200() -> Peaks:
    peaks = Peaks(device="NVIDIA H200", date="2026-11-15", about={"driver": "580.1", "sm_clock_mhz": 1980})
    return peaks.with_points("gemm", GEMMS).with_points("copy", COPIES)


def test_the_best_of_each(h200: Peaks) -> None:
    assert (h200.best_gemm("bf16"), h200.best_gemm("fp32"), h200.best_gemm("fp8")) == (7.4e14, 5.0e13, None)
    assert h200.best_copy() == 4.1e12
    assert h200.best("collective", "bytes_per_s", op="all_reduce") is None


def test_saved_as_lists_of_points_and_loaded_again(home: Home, h200: Peaks) -> None:
    save_peaks(home, h200)
    table = json.loads((home.peaks / "nvidia-h200.json").read_text())
    assert (table["device"], table["date"], table["gemm"]) == ("NVIDIA H200", "2026-11-15", GEMMS)
    assert load_peaks(home, "NVIDIA H200") == h200


def test_nothing_measured_yet(home: Home) -> None:
    assert load_peaks(home, "NVIDIA H200") is None
    assert new_peaks("cpu").best_copy() is None


def test_used_only_where_the_device_matches(home: Home, h200: Peaks) -> None:
    save_peaks(home, h200)
    path = peaks_path(home, "NVIDIA H200")
    path.rename(peaks_path(home, "NVIDIA H100"))
    assert load_peaks(home, "NVIDIA H100") is None


def test_saving_again_keeps_old_points_and_renews_those_measured_again(home: Home, h200: Peaks) -> None:
    save_peaks(home, h200)
    again = GEMMS[1] | {"flops": 7.1e14}
    disk = {"op": "write", "bytes": 1 << 30, "bytes_per_s": 2.0e9, "path": "/data"}
    newer = Peaks(device="NVIDIA H200", date="2026-11-20", about={"driver": "590.0"})
    saved = save_peaks(home, newer.with_points("gemm", [again]).with_points("disk", [disk]))
    assert saved == load_peaks(home, "NVIDIA H200")
    assert (saved.date, saved.about) == ("2026-11-20", {"driver": "590.0", "sm_clock_mhz": 1980})
    assert saved.best_gemm("bf16") == 7.1e14
    assert len(saved.points["gemm"]) == 3
    assert saved.points["disk"] == (disk,)


def test_further_kinds_are_kept_as_they_come(home: Home, h200: Peaks) -> None:
    peaks = h200.with_points("convolution", [{"heads": 32, "shape": [1, 2], "flops": 1.0}, {"heads": 8, "flops": 2.0}])
    save_peaks(home, peaks)
    loaded = load_peaks(home, "NVIDIA H200")
    assert loaded is not None and loaded.best("convolution", "flops", heads=32) == 1.0


def test_devices_do_not_mix(h200: Peaks) -> None:
    with pytest.raises(BadInput, match="peaks of cpu do not belong to NVIDIA H200"):
        h200.merge(new_peaks("cpu"))


def test_points_that_lack_something(home: Home, h200: Peaks) -> None:
    with pytest.raises(BadData, match=r"^a gemm point of NVIDIA H200 lacks dtype, flops; measure again"):
        h200.with_points("gemm", [{"m": 1, "n": 1, "k": 1}])
    path = peaks_path(home, "NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text('{"device": "NVIDIA H200", "date": "2026-11-15", "copy": [3]}')
    with pytest.raises(BadData, match="a copy point of NVIDIA H200 lacks fields"):
        load_peaks(home, "NVIDIA H200")
    path.write_text('{"gemm": []}')
    with pytest.raises(BadData, match="lacks device or date; delete it and measure again"):
        load_peaks(home, "NVIDIA H200")


def test_what_was_seen_beside_a_result_is_no_part_of_what_was_tried() -> None:
    point = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 7.9e14, "beside": {"spread": 0.01}}
    again = point | {"flops": 7.6e14, "beside": {"spread": 0.03, "clock_hz": 1.98e9}}
    peaks = new_peaks("NVIDIA H200").with_points("gemm", [point]).with_points("gemm", [again])
    assert peaks.points["gemm"] == (again,) and peaks.best_gemm("bf16") == 7.6e14


def test_the_better_of_two_looks_counts() -> None:
    first = new_peaks("x").with_points("copy", [{"bytes": 1, "bytes_per_s": 5.0}, {"bytes": 2, "bytes_per_s": 9.0}])
    again = new_peaks("x").with_points("copy", [{"bytes": 1, "bytes_per_s": 7.0}, {"bytes": 2, "bytes_per_s": 1.0}])
    again = again.with_points("launch", [{"seconds": 3.0}])
    best = first.better_of(again)
    assert [point["bytes_per_s"] for point in best.points["copy"]] == [7.0, 9.0]
    assert best.points["launch"][0]["seconds"] == 3.0, "what is no rate is the newer one's"
