"""A step on a processor: what a rank's threads reach, what plain operators move, and exchanges that nothing hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.planning.device_model.attention_curve import measured_attention
from armillary.planning.device_model.efficiency import AUTOGRAD_CALL, TORCH_CALL_S
from armillary.planning.device_model.frameworks import OURS, OURS_ON_CPU
from armillary.planning.device_model.measured_peaks import cpu_peaks, peaks_per_rank
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, save_peaks


def peaks(name: str, flops: float, copy: float | None, passes: float) -> Peaks:
    found = new_peaks(name).with_points("gemm", [{"m": 1, "n": 1, "k": 1, "dtype": "bf16", "flops": flops}])
    found = found.with_points("passes", [{"dtype": "bf16", "tokens": 1024, "bytes_per_s": passes}])
    return found if copy is None else found.with_points("copy", [{"bytes": 1, "bytes_per_s": copy}])


def case(**more: Any) -> TrainCase:
    small = replace(catalogue.model("armillary-2m").config, vocab=1024)
    made = {"model": small, "cluster": catalogue.cluster("cpu"), "sequence": 128, "batch_tokens": 2048} | more
    return TrainCase(**{"software": OURS_ON_CPU} | made)


def step(*, layout: Layout | None = None, **more: Any) -> Any:
    return predict(case(**more), as_arrays([layout or Layout(micro_batch=4)])).time


def test_a_rank_has_its_share_and_more_where_its_threads_do_more_alone() -> None:
    whole, own = peaks("x", 800e9, 20e9, 16e9), peaks("y", 700e9, 15e9, 5e9)
    made = peaks_per_rank(own, whole, 0.5)
    assert made.best_gemm("bf16") == 700e9, "units that multiply are a core's own"
    assert made.best_copy() == 10e9, "memory is everybody's, whatever one thread does alone"
    assert made.best("passes", "bytes_per_s") == 8e9, "measured on a busy machine: it cannot be less than its share"
    quick = peaks_per_rank(peaks("y", 700e9, 15e9, 14e9), whole, 0.5)
    assert quick.best("passes", "bytes_per_s") == 10e9, "what operators move is memory's too"
    assert peaks_per_rank(own, whole, 0.25, 0.5).best_gemm("bf16") == 350e9, "two ranks a core take turns"


def test_ceilings_of_as_many_threads_as_a_rank_has(tmp_path: Any) -> None:
    home, chip, cores = Home.at(tmp_path), here().chip, max(2, here().num_devices)
    assert cpu_peaks(home, chip, cores, 2) == (None, 0.5)
    save_peaks(home, peaks(device_name("cpu"), 800e9, 20e9, 16e9))
    found, share = cpu_peaks(home, chip, cores, 2)
    assert found is not None and found.best_gemm("bf16") == 800e9 and share == 0.5
    save_peaks(home, peaks(device_name("cpu", threads=max(1, cores // 2)), 900e9, None, 9e9))
    found, share = cpu_peaks(home, chip, cores, 2)
    assert found is not None and found.best_gemm("bf16") == 900e9 and share == 1.0


def test_all_threads_reach_what_one_does(tmp_path: Any) -> None:
    home, chip = Home.at(tmp_path), here().chip
    save_peaks(home, peaks(device_name("cpu"), 800e9, 20e9, 1e9))
    save_peaks(home, peaks(device_name("cpu", threads=1), 500e9, 15e9, 9e9))
    found, share = cpu_peaks(home, chip, here().num_devices, 1)
    assert found is not None and share == 1.0 and found.best_copy() == 20e9 and found.best_gemm("bf16") == 800e9
    assert found.best("passes", "bytes_per_s") == 9e9 or here().num_devices == 1, "others ran when all were measured"


def test_attention_between_measured_lengths_and_head_dims() -> None:
    apart = [
        {"keys": keys, "head_dim": dim, "dtype": "bf16", "backward": True, "flops": 1e9}
        for keys, dim in ((128, 64), (2048, 128))
    ]
    assert measured_attention(new_peaks("x").with_points("attention", apart), 1.0, ("bf16",), backward=True) is None
    tried = [(128, 64, 10e9), (2048, 64, 160e9), (128, 32, 5e9)]
    points = [
        {"keys": keys, "head_dim": dim, "dtype": "bf16", "backward": True, "flops": rate} for keys, dim, rate in tried
    ]
    measured = new_peaks("x").with_points("attention", points)
    curve = measured_attention(measured, 0.5, ("bf16", "fp16"), backward=True)
    assert curve is not None and measured_attention(measured, 0.5, ("bf16",), backward=False) is None
    assert curve.flops(np.array([128.0, 512.0, 2048.0, 9999.0]), 64) == pytest.approx([5e9, 20e9, 80e9, 80e9])
    assert curve.flops(np.array(2048.0), 32) == pytest.approx(40e9)


def test_calls_come_on_top_of_the_work() -> None:
    """The same tokens in more micro-batches: as much work, more calls, and nothing runs ahead of a processor."""
    few, many = (step(layout=Layout(micro_batch=size)) for size in (16, 1))
    assert many.launch[0] == pytest.approx(16 * few.launch[0])
    assert few.launch[0] > 500 * TORCH_CALL_S * AUTOGRAD_CALL and many.memory[0] >= few.memory[0]


def test_layers_that_are_compiled_move_less() -> None:
    ends = 2048 * 1024 * 44 / case().curves.eager_bytes_per_s["bf16"]
    assert ends < step(compiled=True).memory[0] < 0.75 * step().memory[0], "the loss is not"


def test_cores_that_carry_an_exchange_do_not_compute_beside_it() -> None:
    model = catalogue.model("armillary-1b").config
    both = Layout(dp=2, micro_batch=4)
    here, there = (
        step(model=model, cluster=catalogue.cluster("h100x2"), software=one, layout=both, batch_tokens=2048)
        for one in (OURS_ON_CPU, OURS)
    )
    assert here.exposed[0] == pytest.approx(here.comm[0])
    assert there.exposed[0] < 0.5 * there.comm[0]


def test_gradients_that_fit_one_bucket_are_sent_when_all_are_there() -> None:
    layout = Layout(dp=2, micro_batch=4)
    one, many = (
        step(software=OURS, cluster=catalogue.cluster("h100x2"), layout=replace(layout, bucket_bytes=size))
        for size in (25_000_000, 500_000)
    )
    assert one.comm_costs["gradients"].exposed[0] == pytest.approx(one.comm_costs["gradients"].total[0])
    assert many.comm_costs["gradients"].exposed[0] < one.comm_costs["gradients"].exposed[0]
