"""Rates of each dtype: from stored ceilings at the nearest shape, from a probe that is kept, from flags."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.profiling.ceilings.gemm import cases, is_emulated, measure
from armillary.profiling.ceilings.settings import settings_for
from armillary.profiling.dtypes import rates as module
from armillary.profiling.dtypes.probe import probe
from armillary.profiling.dtypes.rates import (
    PROBE,
    RunShape,
    catalogue_rates,
    cluster_rates,
    cpu_rates,
    flag_rates,
    measured_rates,
    probe_rates,
)
from armillary.spec import catalogue
from armillary.spec.precision import training_dtype
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, save_peaks

SHAPE = RunShape(rows=1024, hidden=512, ffn=2048, keys=128, head_dim=64)


def gemm(dtype: str, size: int, flops: float, **beside: object) -> dict[str, object]:
    return {"m": size, "n": size, "k": size, "dtype": dtype, "flops": flops, "beside": beside}


def peaks(*points: dict[str, object], attention: tuple[tuple[str, float], ...] = ()) -> Peaks:
    made = new_peaks(device_name("cpu")).with_points("gemm", points)
    rows = [
        {"keys": 128, "head_dim": 64, "dtype": dtype, "backward": False, "flops": flops} for dtype, flops in attention
    ]
    return made.with_points("attention", rows) if rows else made


def test_the_nearest_measured_shape_counts() -> None:
    made = peaks(gemm("fp32", 256, 50e9), gemm("fp32", 1024, 100e9), gemm("bf16", 256, 20e9), gemm("bf16", 1024, 400e9))
    large, small = (measured_rates(made, replace(SHAPE, rows=size, hidden=size, ffn=size)) for size in (2048, 128))
    assert large is not None and large.speedup("bf16") == 4.0 and training_dtype(large).dtype == "bf16"
    assert small is not None and small.speedup("bf16") == 0.4 and training_dtype(small).dtype == "fp32"
    assert "measured" in large.source


def test_attention_is_asked_as_well_as_gemm() -> None:
    points = gemm("fp32", 1024, 100e9), gemm("bf16", 1024, 400e9)
    quick, slow = (
        measured_rates(peaks(*points, attention=(("fp32", 50e9), ("bf16", half))), SHAPE) for half in (100e9, 40e9)
    )
    assert quick is not None and training_dtype(quick).dtype == "bf16"
    assert slow is not None and training_dtype(slow).dtype == "fp32"


def test_a_decode_step_has_a_rate_of_its_own() -> None:
    one_row = {**gemm("fp32", 2048, 5e9), "m": 1}
    found = measured_rates(peaks(gemm("fp32", 1024, 100e9), one_row, gemm("bf16", 1024, 1e9)), SHAPE)
    assert found is not None and found.by_dtype["fp32"].decode == 5e9 and found.by_dtype["fp32"].gemm == 100e9
    assert found.is_emulated("bf16"), "a hundredth of fp32's rate"


def test_one_dtype_alone_decides_nothing() -> None:
    assert measured_rates(peaks(gemm("fp32", 1024, 1e11)), SHAPE) is None
    assert probe_rates([]) is None


def test_stored_ceilings_come_before_a_probe(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_probed", lambda *args: pytest.fail("nothing is probed where it was measured"))
    save_peaks(home, peaks(gemm("fp32", 1024, 100e9), gemm("bf16", 1024, 300e9)))
    assert cpu_rates(home, SHAPE).speedup("bf16") == pytest.approx(3.0)
    assert cluster_rates(home, here(device="cpu"), SHAPE).speedup("bf16") == pytest.approx(3.0)


@pytest.mark.slow  # judges the clock
def test_a_probe_is_short(home: Home) -> None:
    began = time.perf_counter()
    cpu_rates(home, SHAPE)
    assert time.perf_counter() - began < 20, "well under a second on an idle machine"


def test_a_probe_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cpu_rates(home, SHAPE)
    assert made.source == "a short probe" and made.by_dtype["fp32"].gemm > 0
    monkeypatch.setattr(module, "_probed", lambda *args: pytest.fail("it was kept"))
    again = cpu_rates(home, SHAPE)
    assert again.by_dtype["fp32"].gemm == made.by_dtype["fp32"].gemm


def test_an_emulated_format_is_looked_at_on_one_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.profiling.dtypes import probe as dtype_probe

    seen: list[tuple[int, int, int, str]] = []

    def rate(m: int, n: int, k: int, dtype: str, device: torch.device) -> float:
        seen.append((m, n, k, dtype))
        return 100e9 if dtype == "fp32" else 1e9

    monkeypatch.setattr(dtype_probe, "_gemm_rate", rate)
    monkeypatch.setattr(dtype_probe, "has_native", lambda dtype: False)
    rows = {point["dtype"]: point for point in probe("cpu", SHAPE).points[PROBE]}
    assert rows["bf16"]["emulated"] and "attention" not in rows["bf16"] and "emulated" not in rows["fp32"]
    assert [size[:3] for size in seen if size[3] == "bf16"] == [dtype_probe.SMALL]


def test_a_probe_beside_other_work_is_done_again_and_the_quickest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.profiling.dtypes import probe as dtype_probe

    rounds = [{"fp32": 100e9, "bf16": 40e9, "fp16": 90e9}, {"fp32": 90e9, "bf16": 300e9, "fp16": 20e9}]
    left = [rates[dtype] for rates in [*rounds, *rounds] for dtype in ("fp32", "bf16", "fp16")]
    point = {"decode": 1.0, "attention": 1.0}
    monkeypatch.setattr(dtype_probe, "_look", lambda dtype, *_: {"dtype": dtype, "flops": left.pop(0), **point})
    monkeypatch.setattr(dtype_probe, "has_native", lambda dtype: dtype != "fp16")
    rows = {point["dtype"]: point["flops"] for point in probe("cpu", SHAPE).points[PROBE]}
    assert rows == {"fp32": 100e9, "bf16": 300e9, "fp16": 90e9} and len(left) == 6


def test_a_dtype_with_units_of_its_own_is_slow_and_not_emulated(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    save_peaks(home, peaks(gemm("fp32", 1024, 100e9), gemm("bf16", 1024, 40e9), gemm("fp16", 1024, 1e9)))
    for native, words in ((True, "bf16 gains too little, GEMM 0.4 ×"), (False, "bf16 and fp16 are emulated here")):
        monkeypatch.setattr("armillary.machine.features.has_native", lambda dtype, native=native: native)
        found = cpu_rates(home, SHAPE)
        assert words in training_dtype(found).reason and found.is_emulated("fp16"), "torch does not use its units"


def test_ceilings_of_an_emulated_format_are_one_small_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from armillary.profiling.ceilings import gemm as section

    monkeypatch.setattr(section, "_once_s", lambda dtype, settings: 1e-3 if dtype == "fp32" else 5e-3)
    monkeypatch.setattr(section, "has_native", lambda dtype: dtype == "fp16")
    settings = replace(settings_for(torch.device("cpu"), quick=True, folder=tmp_path), budget_s=1e-3, cache_bytes=1)
    assert is_emulated("bf16", settings) and not is_emulated("fp32", settings)
    assert not is_emulated("fp16", settings), "it has units, so other work was in the way"
    chosen = [case for case in cases(settings) if case["dtype"] == "bf16"]
    ((kind, point),) = measure(chosen, settings)
    assert kind == "gemm" and point["beside"]["emulated"] and point["m"] * point["n"] * point["k"] < 1e7
    assert new_peaks("x").with_points("gemm", [point]).is_emulated("bf16")


def test_chips_of_the_catalogue_by_their_peaks() -> None:
    taken = {name: training_dtype(catalogue_rates(catalogue.chip(name))).dtype for name in ("h100", "v100-16gb", "t4")}
    assert taken == {"h100": "bf16", "v100-16gb": "fp16", "t4": "fp16"}


def test_without_torch_the_flags_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, taken in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("armillary.machine.features.has_native", lambda dtype, native=native: native)
        assert training_dtype(flag_rates()).dtype == taken
