"""Rooflines are measured, else from the catalogue, else unknown; bounds follow from them."""

from __future__ import annotations

import pytest

from armillary.profiling.analysis.roofline import bound, peak_flops, roofline_for
from armillary.profiling.profile import Roofline
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks

ROOFLINE = Roofline(device="x", flops={"fp32": 1e12, "bf16": 1e13}, bytes_per_s=1e11, source="measured")


def test_measured_before_catalogue_before_unknown(home: Home) -> None:
    peaks = new_peaks("NVIDIA H200")
    assert roofline_for("NVIDIA H200", home).source == "catalogue"
    peaks = peaks.with_points("gemm", [{"m": 1, "n": 1, "k": 1, "dtype": "bf16", "flops": 7.69e14}])
    save_peaks(home, peaks.with_points("copy", [{"bytes": 1, "bytes_per_s": 4.17e12}]))
    roofline = roofline_for("NVIDIA H200", home)
    assert (roofline.source, roofline.flops["bf16"], roofline.bytes_per_s) == ("measured", 7.69e14, 4.17e12)
    assert roofline_for("Nobody's Chip 9", home).source == "unknown"


@pytest.mark.parametrize("name", ["NVIDIA A100-PG509-200", "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3"])
def test_names_that_drivers_give(name: str) -> None:
    assert roofline_for(name, None).source == "catalogue"


def test_peaks_stand_in_for_their_neighbours() -> None:
    assert peak_flops(ROOFLINE, "fp16") == 1e13 and peak_flops(ROOFLINE, "fp8") == 1e13
    assert peak_flops(ROOFLINE, "bf16", matrix=False) == 1e12
    assert peak_flops(Roofline(device="?"), "bf16") is None


@pytest.mark.parametrize(
    ("flops_s", "bytes_s", "seconds", "expected"),
    [
        (9e-4, 1e-4, 1e-3, "compute"),
        (1e-4, 9e-4, 1e-3, "memory"),
        (1e-9, 1e-8, 4e-6, "overhead"),
        (None, None, 1e-3, "unknown"),
        (None, 1e-4, 1e-3, "memory"),
    ],
)
def test_bounds(flops_s: float | None, bytes_s: float | None, seconds: float, expected: str) -> None:
    assert bound(flops_s, bytes_s, seconds, 1, 5e-6) == expected
