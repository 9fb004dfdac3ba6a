"""What is measured is stored as peaks and drawn, and places are the mounts where files can be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.profiling.memory import cpu_latency, gpu_texts, measure
from armillary.profiling.memory.blas import work_of
from armillary.profiling.memory.measure import CACHES, MemoryBench, _with_levels, sync_points
from armillary.profiling.memory.page import memory_page
from armillary.profiling.memory.published import compared
from armillary.profiling.memory.storage import places
from armillary.store.peaks import new_peaks
from tests.profiling.memory.test_plateaus import HIERARCHIES, curve


def test_a_cycle_visits_every_node_once_some_pages_at_a_time() -> None:
    offsets = cpu_latency.unit_by_unit(256 << 10, np.random.default_rng(0))
    assert sorted(offsets) == list(range(0, 256 << 10, cpu_latency.LINE))
    of_unit = offsets.reshape(4, -1) // cpu_latency.UNIT
    assert (of_unit == of_unit[:, :1]).all()
    assert (np.abs(np.diff(offsets)) > cpu_latency.LINE).mean() > 0.9, "a prefetcher would follow"


def test_a_load_from_this_cpu_takes_some_cycles_and_none_of_a_small_set_is_slow() -> None:
    memory = cpu_latency.Memory(64 << 10)
    seconds = memory.seconds(cpu_latency.unit_by_unit(8 << 10, np.random.default_rng(0)))
    assert 1e-10 < seconds < 1e-6


def test_threads_are_timed_alone_and_together() -> None:
    assert [point["what"] for point in sync_points(1)] == ["atomic add"]
    assert all(point["seconds"] > 0 for point in sync_points(1))


@pytest.mark.parametrize(
    ("case", "intensity"),
    [({"op": "saxpy", "bytes": 8000}, 1 / 6), ({"op": "gemv", "n": 1000}, 0.499), ({"op": "gemm", "n": 600}, 100.0)],
)
def test_the_levels_of_blas_differ_in_flops_per_byte(case: dict[str, object], intensity: float) -> None:
    flops, moved = work_of(case)
    assert flops / moved == pytest.approx(intensity, rel=1e-3)


def test_places_are_the_writable_mounts_with_files_of_their_own(tmp_path: Path) -> None:
    mounts = (
        f"/dev/vda / ext4 rw 0 0\nproc /proc proc rw 0 0\nsysfs /sys sysfs rw 0 0\nx {tmp_path}/a\\040b ext4 rw 0 0\n"
    )
    (tmp_path / "a b").mkdir()
    found = places([tmp_path], mounts)
    assert next(iter(found)) == tmp_path.resolve() and Path("/proc") not in found and Path("/sys") not in found
    assert set(found.values()) <= {"ext4"} and len({path.stat().st_dev for path in found}) == len(found)


def test_the_page_shows_the_levels_beside_what_was_published_of_the_chip() -> None:
    levels, memory = HIERARCHIES["a GPU, in ns"]
    points = [(size, latency * 1e-9) for size, latency in curve(levels, memory, 0, "lru", 12)]
    bench = _with_levels(
        MemoryBench(peaks=new_peaks("NVIDIA H200")), CACHES, points, lambda count: ["L1", "L2", "L2, far", "memory"]
    )
    assert {each.level: each.within for each in compared(bench.peaks)} == {
        "L1": True,
        "L2": True,
        "L2, far": True,
        "memory": True,
    }
    html = memory_page(bench)
    assert "Beside published values" in html and "17 ns" in html and "<polyline" in html
    assert compared(new_peaks("Some CPU")) == []


def test_ffma_probes_have_as_many_source_registers_as_they_say() -> None:
    for sources in (1, 2, 3):
        line = next(line for line in gpu_texts.fma(sources, 1).splitlines() if line.startswith("fma"))
        assert len(set(line.removesuffix(";").split(" ", 1)[1].split(", ")[1:])) == sources


def test_saxpy_by_every_width_gives_the_same() -> None:
    from armillary.profiling.memory.probes import probes

    x, y = torch.arange(40.0), torch.ones(40)
    for width in (4, 8, 16, 32, 64):
        out = y.clone()
        assert probes().armillary_saxpy(width, 0.5, x.data_ptr(), out.data_ptr(), 32, 1) > 0
        assert torch.equal(out[:32], (y + 0.5 * x)[:32]) and torch.equal(out[32:], y[32:])
    assert probes().armillary_saxpy(3, 0.5, x.data_ptr(), y.data_ptr(), 32, 1) == -1


def test_a_part_that_fails_is_named_on_the_page_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> list[tuple[float, float]]:
        raise RuntimeError("no such instruction\nand more")

    def half(cores: int) -> Iterator[dict[str, object]]:
        yield {"what": "atomic add", "threads": 1, "seconds": 1e-9, "beside": {}}
        raise ValueError("the second one hangs")

    levels, memory = HIERARCHIES["server, x86"]
    points = [(size, latency * 1e-9) for size, latency in curve(levels, memory, 0, "lru", 6)]
    monkeypatch.setattr(measure, "_cpu_translation", broken)
    monkeypatch.setattr(measure, "sync_points", half)
    monkeypatch.setattr(cpu_latency, "cache_curve", lambda *_: points)
    saved: list[MemoryBench] = []
    only = ("translation", "units", "latency")
    bench = measure.measure_memory(torch.device("cpu"), only=only, folders=(tmp_path,), mounts="", save=saved.append)
    assert set(bench.failed) == {"address translation", "units"} and len(saved) == 3
    assert len(bench.peaks.points["sync"]) == 1 and len(bench.peaks.points["latency"]) == len(levels) + 1
    html = memory_page(bench)
    assert "Not measured" in html and "RuntimeError: no such instruction" in html and "and more" not in html
    assert "the second one hangs" in html


def test_cycles_of_instructions_are_drawn() -> None:
    points = [
        {"what": what, "threads": 32, "seconds": 1e-9, "beside": {"cycles": cycles}}
        for what, cycles in (("shared memory, stride 1", 29.0), ("shared memory, stride 32", 92.5), ("barrier", 20.0))
    ]
    html = memory_page(MemoryBench(peaks=new_peaks("NVIDIA H200").with_points("sync", points)))
    assert "Cycles: shared memory." in html and ">92.5<" in html and "Cycles: FFMA" not in html


@pytest.mark.gpu
def test_every_part_is_measured_on_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda")
    bench = measure.measure_memory(device, quick=True, only=("latency", "translation", "units"), folders=(tmp_path,))
    assert bench.failed == {}
    levels = [point["seconds"] for point in bench.peaks.points["latency"] if point["level"] in ("L1", "L2", "memory")]
    assert len(levels) >= 3 and levels[0] < levels[-1]
    cycles = {point["what"]: point["beside"]["cycles"] for point in bench.peaks.points["sync"]}
    assert cycles["shared memory, stride 32"] > 1.5 * cycles["shared memory, stride 1"]
    assert cycles["shared memory, stride 33"] < 1.5 * cycles["shared memory, stride 1"]
    assert cycles["FFMA, 1 source registers, 8 chains"] < cycles["FFMA, 1 source registers, 1 chains"]
