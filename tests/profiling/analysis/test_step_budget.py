"""The budget adds up to the wall time, and each planted cause lands in its own part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.profiling.analysis.analyse import amdahl_of, analyse
from armillary.profiling.profile import Profile
from armillary.profiling.trace.read_trace import read_trace
from tests.profiling.traces import EXCERPTS, ROOFLINE, HandMade


@pytest.fixture
def profiled(tmp_path: Path):
    def run(made: HandMade) -> Profile:
        profile = analyse(made.write(tmp_path / "trace.json"), roofline=ROOFLINE)
        assert sum(profile.budget.values()) == pytest.approx(profile.wall_s, rel=1e-9)
        return profile

    return run


def us(profile: Profile, part: str) -> float:
    return profile.budget[part] * 1e6


def test_a_gemm_at_half_the_roofline(profiled) -> None:
    """2·1000³ FLOPs at 10 TFLOP/s need 200 µs; the kernel takes 400."""
    made = HandMade().step(500).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    profile = profiled(made.kernel("sgemm_128x128", launched=2, at=100, takes=400))
    assert us(profile, "useful") == pytest.approx(200) and us(profile, "inefficiency") == pytest.approx(200)
    row = profile.kernels[0]
    assert (row.work, row.bound, row.flops) == ("gemm", "compute", 2e9) and row.roofline_fraction == pytest.approx(0.5)
    assert profile.operators[0].device_s == pytest.approx(400e-6)
    assert "gemm" in " ".join(profile.findings) and "50% of the compute roofline" in " ".join(profile.findings)


def test_kernels_of_one_operator_share_its_work(profiled) -> None:
    made = HandMade().step(400).op("aten::mm", 0, 20, [1000, 1000], [1000, 1000])
    made.kernel("split", launched=1, at=30, takes=90).kernel("reduce", launched=6, at=120, takes=270)
    rows = {row.name: row.flops for row in profiled(made).kernels}
    assert rows == {"split": pytest.approx(0.5e9), "reduce": pytest.approx(1.5e9)}


def test_exposed_communication_is_what_no_kernel_hides(profiled) -> None:
    made = HandMade().step(400)
    made.kernel("elementwise", launched=0, at=10, takes=190)
    made.kernel("ncclDevKernel_AllReduce_Sum_f32", launched=5, at=100, takes=300, stream=20)
    profile = profiled(made)
    assert us(profile, "comm_exposed") == pytest.approx(200)
    assert any("communication stands alone" in line for line in profile.findings)
    assert "collective" in {gap.cause for gap in profile.gaps}


def test_overlapping_kernels_count_once(profiled) -> None:
    made = HandMade().step(210).kernel("a_elementwise", launched=0, at=10, takes=200)
    profile = profiled(made.kernel("b_elementwise", launched=4, at=10, takes=200, stream=8))
    assert us(profile, "unjudged") == pytest.approx(200)


def test_five_thousand_tiny_kernels_are_launch_bound(profiled) -> None:
    made = HandMade().step(5000 * 10)
    for i in range(5000):
        made.op("aten::add", i * 10, 9, [16], [16])
        made.kernel("vectorized_elementwise", launched=i * 10 + 3, at=i * 10 + 8, takes=1)
    profile = profiled(made)
    assert profile.fraction("launch_gap") > 0.85
    assert "5,000 kernels per step" in profile.findings[0] and "launch-bound" in profile.findings[0]
    assert {gap.cause for gap in profile.gaps} == {"launch"}


def test_a_sleeping_loader(profiled) -> None:
    made = HandMade().step(10_000).python("train.py(88): main", 0, 10_000)
    made.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 9_000)
    made.kernel("elementwise", launched=10, at=20, takes=400).kernel("elementwise", launched=9_520, at=9_530, takes=470)
    profile = profiled(made)
    assert us(profile, "host") == pytest.approx(9_000, rel=0.01)
    assert (profile.gaps[0].cause, profile.gaps[0].where) == ("loader", "train.py:88")
    assert "loader starves the device" in profile.findings[0] and "train.py:88" in profile.findings[0]


def test_item_in_the_loop(profiled) -> None:
    """The queue is empty after it: what it takes to fill it again is its price."""
    made = HandMade().step(3 * 1000).python("train.py(131): step", 0, 3000)
    for t in (0, 1000, 2000):
        made.kernel("elementwise", launched=t, at=t + 100, takes=500)
        made.op("aten::item", t + 10, 640).op("aten::_local_scalar_dense", t + 12, 630)
        made.kernel(
            "Memcpy DtoH (Device -> Pinned)",
            launched=t + 20,
            at=t + 600,
            takes=10,
            cat="gpu_memcpy",
            call="cudaMemcpyAsync",
            bytes=4,
        )
        made.call("cudaStreamSynchronize", t + 30, 600)
        for i in range(8):  # the next operators begin to come, 40 µs apart
            made.op("aten::view", t + 660 + 40 * i, 30, [4])
    profile = profiled(made)
    assert profile.fraction("sync") > 0.3 and profile.fraction("sync") > 3 * profile.fraction("host")
    assert any(".item() at train.py:131 blocks" in line for line in profile.findings)


def test_a_pageable_copy(profiled) -> None:
    made = HandMade().step(2_000).kernel("elementwise", launched=0, at=10, takes=90)
    made.op("aten::copy_", 95, 1500, [1000, 1000], [1000, 1000])
    made.kernel(
        "Memcpy HtoD (Pageable -> Device)",
        launched=100,
        at=800,
        takes=700,
        cat="gpu_memcpy",
        call_takes=1450,
        call="cudaMemcpyAsync",
        bytes=4_000_000,
    )
    made.kernel("elementwise", launched=1_600, at=1_610, takes=390)
    profile = profiled(made)
    assert us(profile, "sync") > 1_300
    assert profile.gaps[0].cause == "copy" and "pin the memory" in profile.findings[0]


def test_a_memory_bound_chain(profiled) -> None:
    made = HandMade().step(1_000)
    for i in range(10):  # 4 MB in, 4 MB in, 4 MB out at 1 TB/s: 12 µs, measured 95
        made.op("aten::mul", i * 5, 4, [1000, 1000], [1000, 1000])
        made.kernel("vectorized_elementwise_kernel", launched=i * 5 + 1, at=60 + i * 94, takes=94)
    profile = profiled(made)
    assert profile.kernels[0].bound == "memory" and profile.kernels[0].bytes == 10 * 12e6
    assert any("memory-bound operations per step" in line for line in profile.findings)


def test_a_hog_of_the_interpreter_lock(profiled) -> None:
    """Every time torch lets go of the lock, the main thread waits 5 ms to have it again."""
    made = HandMade().step(8 * 5_200)
    for i in range(8):
        t = i * 5_200
        made.op("aten::mul", t, 30, [10], [10]).kernel("elementwise", launched=t + 5, at=t + 20, takes=150)
    profile = profiled(made)
    assert "gil" in {gap.cause for gap in profile.gaps}
    assert "interpreter lock" in profile.findings[0]


def test_gaps_inside_a_cuda_graph_are_not_the_hosts(profiled) -> None:
    made = HandMade().step(1_000).kernel("gemv_kernel", launched=0, at=20, takes=90, call="cudaGraphLaunch")
    for i in range(1, 9):
        made.on_device("gemv_kernel", at=20 + i * 100, takes=90)
    profile = profiled(made)
    assert us(profile, "idle") == pytest.approx(80) and us(profile, "host") < 100
    assert profile.kernels[0].details["in_cuda_graph"] == 9 and profile.kernels[0].work == "gemm"
    assert any("CUDA graphs" in note for note in profile.notes)


def test_a_graph_s_kernel_takes_the_work_of_its_eager_twin(profiled) -> None:
    made = HandMade().step(1_000).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    made.kernel("sgemm", launched=1, at=20, takes=400, grid=[8, 8, 1])
    made.kernel("sgemm", launched=430, at=450, takes=400, grid=[8, 8, 1], call="cudaGraphLaunch")
    assert profiled(made).kernels[0].flops == pytest.approx(4e9)


def test_fused_triton_kernels_by_their_tensors(profiled) -> None:
    made = HandMade().step(100).op("triton_poi_fused_add_0", 0, 10, [1000, 1000], [1000, 1000], dtype="c10::BFloat16")
    row = profiled(made.kernel("triton_poi_fused_add_0", launched=1, at=10, takes=90)).kernels[0]
    assert (row.bytes, row.work, row.bound) == (4e6, "elementwise", "memory")


def test_a_queue_that_does_not_move_is_held_by_work_the_trace_lacks(profiled) -> None:
    made = HandMade().step(1_000).kernel("elementwise", launched=0, at=10, takes=90)
    profile = profiled(made.kernel("elementwise", launched=5, at=600, takes=400))
    assert us(profile, "unjudged") == pytest.approx(500 + 490)
    assert profile.gaps[0].cause == "unrecorded" and "does not have" in profile.gaps[0].what


def test_a_step_ends_with_what_it_launched(profiled) -> None:
    """What another part of the program launches after the last step is none of its."""
    made = HandMade().step(100).kernel("elementwise", launched=5, at=60, takes=90)
    profile = profiled(made.kernel("elementwise", launched=5_000, at=5_010, takes=50))
    assert profile.wall_s == pytest.approx(150e-6)


def test_a_kernel_that_runs_into_the_window_counts_with_its_part(profiled) -> None:
    made = HandMade().step(500).kernel("elementwise", launched=-400, at=-300, takes=400)
    profile = profiled(made.kernel("other_elementwise", launched=10, at=100, takes=400))
    assert sum(row.device_s for row in profile.kernels) == pytest.approx(500e-6)


def test_kernels_side_by_side_share_the_time_they_cover(profiled) -> None:
    """A product at its roofline stays useful though a small kernel runs beside it."""
    made = HandMade().step(210).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    made.kernel("sgemm_128x128", launched=2, at=10, takes=200).op("aten::neg", 10, 5, [4])
    profile = profiled(made.kernel("neg_elementwise", launched=11, at=10, takes=200, stream=8))
    assert us(profile, "useful") == pytest.approx(200, abs=0.1)


def test_two_processes_that_count_alike_are_told_apart(profiled) -> None:
    """Both launches carry the number 1: a kernel belongs to the last one before it."""
    made = HandMade().step(1_000).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    made.kernel("sgemm", launched=2, at=20, takes=300)
    made.correlation = 0
    made.op("aten::relu", 600, 10, [10, 10]).kernel("relu_elementwise", launched=602, at=620, takes=300)
    works = {row.name: row.work for row in profiled(made).kernels}
    assert works == {"sgemm": "gemm", "relu_elementwise": "elementwise"}


def test_copies_to_the_host_are_no_class_of_kernels(profiled) -> None:
    made = HandMade().step(1_000).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    made.kernel("sgemm", launched=2, at=20, takes=500)
    made.kernel(
        "Memcpy DtoH (Device -> Pinned)",
        launched=520,
        at=530,
        takes=400,
        cat="gpu_memcpy",
        call="cudaMemcpyAsync",
        bytes=4,
    )
    shares = {row.work: row.share for row in amdahl_of(profiled(made))}
    assert shares["gemm"] == pytest.approx(0.5) and "copy" not in shares


def test_a_recompilation_is_the_hosts_time(profiled) -> None:
    made = HandMade().step(2_000_000).kernel("elementwise", launched=2, at=10, takes=90)
    made.add("user_annotation", "Torch-Compiled Region: 0/1", 100, 1_999_000)
    profile = profiled(made.kernel("elementwise", launched=1_999_500, at=1_999_510, takes=400))
    assert profile.fraction("host") > 0.9


def test_a_device_without_a_known_roofline(tmp_path: Path) -> None:
    from armillary.profiling.profile import Roofline

    made = HandMade().step(100).kernel("elementwise", launched=0, at=0, takes=100)
    profile = analyse(made.write(tmp_path / "t.json"), roofline=Roofline(device="new"))
    assert profile.fraction("unjudged") == 1.0 and "armillary bench" in profile.notes[0]


spans = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.integers(0, 900),
        st.integers(0, 400),
        st.integers(7, 9),
        st.sampled_from(["gemm", "nccl_all", "elementwise"]),
    ),
    min_size=1,
    max_size=30,
)


@given(spans=spans, host=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 800)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_trace_adds_up(tmp_path_factory: pytest.TempPathFactory, spans: list, host: list) -> None:
    made = HandMade()
    for launched, delay, takes, stream, name in spans:
        made.kernel(name, launched=launched, at=launched + delay, takes=takes, stream=stream)
    for at, takes in host:
        made.op("aten::mm", at, takes, [10, 10], [10, 10])
    profile = analyse(made.write(tmp_path_factory.getbasetemp() / "any.json"), roofline=ROOFLINE)
    assert sum(profile.budget.values()) == pytest.approx(profile.wall_s)
    assert all(seconds >= 0 for seconds in profile.budget.values())


@pytest.mark.parametrize("path", sorted(EXCERPTS.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_traces_of_others(path: Path) -> None:
    from armillary.profiling.analysis.analyse import traced_device
    from armillary.profiling.analysis.roofline import roofline_for

    trace = read_trace(path)
    roofline = roofline_for(traced_device(trace), None)
    profile = analyse(trace, roofline=roofline)
    assert roofline.source == "catalogue"
    assert sum(profile.budget.values()) == pytest.approx(profile.wall_s, rel=5e-3)
    assert profile.fraction("unknown") <= 0.15
    low = min(gap.start_s for gap in profile.gaps)
    assert low >= 0 and Profile.from_json(profile.to_json()).budget == profile.budget
    inside = trace.on_device & (trace.start >= trace.start.min())
    if profile.steps == 1:
        assert sum(row.device_s for row in profile.kernels) == pytest.approx(float(trace.seconds[inside].sum()))


def test_an_operator_names_its_kernels(profiled) -> None:
    made = HandMade().step(500).op("aten::mm", 0, 20, [1000, 1000], [1000, 1000])
    made.kernel("sgemm_128x128", launched=2, at=100, takes=300).kernel("splitKreduce", launched=8, at=400, takes=50)
    assert profiled(made).operators[0].details["kernels"] == ["sgemm_128x128", "splitKreduce"]


@pytest.mark.parametrize(
    ("kernel", "useful_us"),
    [("sm80_xmma_gemm_f32f32_f32f32_f32_tn", 200.0), ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn", 40.0)],
)
def test_fp32_products_are_held_against_the_units_they_ran_on(tmp_path: Path, kernel: str, useful_us: float) -> None:
    made = HandMade().step(500).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    path = made.kernel(kernel, launched=2, at=100, takes=400).write(tmp_path / "t.json")
    profile = analyse(path, roofline=replace(ROOFLINE, flops={"fp32": 1e13, "tf32": 5e13}))
    assert us(profile, "useful") == pytest.approx(useful_us)
    assert profile.operators[0].roofline_s == pytest.approx(useful_us * 1e-6)


def test_kernels_of_a_graph_are_judged_by_their_twins(profiled) -> None:
    """The same kernel with the same grid ran outside the graph, from an operator with shapes."""
    made = HandMade().op("aten::mm", -900, 10, [1000, 1000], [1000, 1000])
    made.kernel("sgemm_128x128", launched=-895, at=-800, takes=400, grid=[8, 8, 1], block=[128, 1, 1])
    made.step(1_000).kernel(
        "sgemm_128x128", launched=2, at=100, takes=400, call="cudaGraphLaunch", grid=[8, 8, 1], block=[128, 1, 1]
    )
    made.on_device("sgemm_128x128", at=500, takes=400, grid=[4, 4, 1], block=[128, 1, 1])
    profile = profiled(made)
    assert us(profile, "useful") == pytest.approx(200) and us(profile, "unjudged") == pytest.approx(400)


def test_the_work_itself_is_named_where_it_is_at_its_roofline(profiled) -> None:
    made = HandMade().step(250).op("aten::mm", 0, 10, [1000, 1000], [1000, 1000])
    first = profiled(made.kernel("sgemm_128x128", launched=2, at=20, takes=220)).findings[0]
    assert first.startswith("sgemm_128x128 (gemm) takes 88% of the time at 91% of the compute roofline")
    assert first.endswith("1.79 × faster if it ran twice as fast")


def test_many_kernels_too_short_for_a_roofline_are_named(profiled) -> None:
    """As in a CUDA graph of unfused operators: no launch gap, and no single kernel that stands out."""
    made = HandMade().step(500)
    for i in range(100):
        made.op("aten::neg", i * 0.2, 0.1, [16]).kernel(
            f"neg{i}_elementwise", launched=i * 0.2 + 0.01, at=10 + i * 4, takes=4, call_takes=0.05
        )
    assert "100 kernels per step are too short for any roofline (4 µs each)" in " ".join(profiled(made).findings)
