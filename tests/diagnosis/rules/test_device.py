"""Rules of the inner loop, each with figures that fire it and figures that do not."""

from __future__ import annotations

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.step_parts import launch_overhead_share
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.device import (
    compute,
    computing,
    data_starvation,
    launch_overhead,
    memory_bandwidth,
    precision,
    sync,
)
from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.planning.device_model.efficiency import AUTOGRAD_CALL, TORCH_CALL_S
from armillary.profiling.dtypes.rates import PROBE
from armillary.profiling.profile import Profile, Roofline, Row
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks
from tests.diagnosis.trained import BUSY, NOWHERE, plan_of, reading_of
from tests.training.test_auto_precision import ceilings

HERE = ("layout.dp=1", "hardware.on=here", "model.name=armillary-5m", "train.sequence=128", "train.batch_tokens=2048")


def test_a_slow_loader_starves_the_device() -> None:
    made = reading_of(plan_of(), data_wait_s=0.4)
    found = data_starvation(made, made.plan)
    assert found is not None and found.loop == "inner" and found.share == pytest.approx(0.4)
    assert found.evidence[0].gauge == "data_wait_fraction"
    assert data_starvation(reading_of(data_wait_s=0.01), None) is None
    late = reading_of(data_wait_s=lambda step: 0.8 if step % 4 == 0 else 0.0)
    assert data_starvation(late, None) is not None, "late every fourth time is late too"


def test_a_page_that_only_tells_the_share_is_read_too() -> None:
    page = Reading(source="x", kind="training", values={"data_wait_fraction": 0.3})
    found = data_starvation(page, None)
    assert found is not None and found.share == 0.3


def test_many_short_kernels_are_launch_overhead() -> None:
    window = BUSY | {"useful": 0.2, "inefficiency": 0.2, "launch_gap": 0.5, "host": 0.05, "launch_bound": 0.1}
    made = reading_of(plan_of(), window=window, kernels=4000.0)
    found = launch_overhead(made, made.plan)
    assert found is not None and found.share == pytest.approx(0.6) and "4,000 kernels" in found.says
    assert launch_overhead(reading_of(), None) is None
    assert launch_overhead(Reading(source="x", kind="training"), None) is None, "nothing was recorded"


def test_on_a_processor_operators_are_counted_and_not_what_else_ran() -> None:
    plan = plan_of("hardware.on=cpux2", "layout.dp=1")
    made = reading_of(plan, kernels=20_000.0, host_cpu_s=0.2)
    counted = 20_000 * TORCH_CALL_S * AUTOGRAD_CALL / 0.2
    assert launch_overhead_share(made, plan) == pytest.approx(counted) and launch_overhead_share(
        made, None
    ) == pytest.approx(0.05)
    found = launch_overhead(made, plan)
    assert found is not None and found.share == pytest.approx(counted)
    assert launch_overhead(reading_of(plan, kernels=2000.0, host_cpu_s=0.9), plan) is None


def test_a_call_is_held_against_steps_of_its_own_moment() -> None:
    """A processor that is half as quick in some steps: calls and steps take twice as long there."""
    plan, slow = plan_of("hardware.on=cpux2", "layout.dp=1"), {5, 6, 7, 8, 12}
    made = reading_of(
        plan,
        kernels=20_000.0,
        host_cpu_s=lambda step: 0.4 if step in slow or step > 15 else 0.2,
        torch_call_s=lambda step: (8e-6 if step in slow else 4e-6) if step < 15 else None,
    )
    assert launch_overhead_share(made, plan) == pytest.approx(20_000 * 4e-6 / 0.2)


def test_a_call_that_was_measured_once_is_held_against_the_median_step() -> None:
    plan = plan_of("hardware.on=cpux2", "layout.dp=1")
    made = reading_of(plan, kernels=20_000.0, host_cpu_s=0.2, torch_call_s=lambda step: 4e-6 if step == 0 else None)
    assert launch_overhead_share(made, plan) == pytest.approx(20_000 * 4e-6 / 0.2)


def test_launches_that_come_late_after_waiting_are_the_waits_fault() -> None:
    made = reading_of(window=BUSY | {"sync": 0.1, "launch_gap": 0.35, "host_stall": 0.04})
    assert launch_overhead(made, None) is None
    found = sync(made, None)
    assert found is not None and found.share == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("window", "between"),
    [({"host": 0.3, "host_stall": 0.3}, 0.0), ({"sync": 0.3}, 0.0), ({"host": 0.02, "host_stall": 0.0}, 0.5)],
)
def test_work_of_the_host_holds_the_device_up(window: dict[str, float], between: float) -> None:
    made = reading_of(window=BUSY | window, between_steps_s=between)
    found = sync(made, None)
    assert found is not None and found.cause == "sync" and 0.25 < found.share < 0.4
    assert ("between steps" in found.says) is (between > 0)


def test_short_stretches_of_python_are_no_stall() -> None:
    assert sync(reading_of(window=BUSY | {"host": 0.2, "host_stall": 0.01, "sync": 0.0}), None) is None


def test_wide_numbers_are_named_where_narrow_ones_are_faster() -> None:
    made = reading_of(plan_of("layout.precision=fp32"))
    found = precision(made, made.plan)
    assert found is not None and "fp32" in found.says
    assert precision(made, plan_of("layout.precision=fp8")) is None and precision(made, None) is None
    verdict = diagnose(made, NOWHERE)
    assert verdict.cause == "precision" and verdict.levers[0].change == {"layout.precision": "bf16"}


def test_16_bits_that_a_cpu_emulates_are_named(home: Home) -> None:
    """The other way round: fp32 is the lever, by the ceilings of the CPU."""
    save_peaks(home, ceilings(20e9, fp32=100e9))
    made = plan_of("layout.precision=bf16", *HERE, cluster=here(device="cpu"), home=home)
    assert any("5 × slower than in fp32" in note for note in made.notes)
    verdict = diagnose(reading_of(made), home)
    assert verdict.cause == "precision" and verdict.levers[0].change == {"layout.precision": "fp32"}
    assert "emulated" in verdict.headline
    wide = plan_of("layout.precision=fp32", *HERE, cluster=here(device="cpu"), home=home)
    assert diagnose(reading_of(wide), home).cause != "precision", "bf16 would be slower"


def test_bf16_is_not_offered_where_a_probe_shows_it_to_be_slower(home: Home) -> None:
    """Without ceilings the planner assumes a CPU with bf16 units."""
    wide = plan_of("layout.precision=fp32", *HERE, cluster=here(device="cpu"), home=home)
    for flops, offered in ((60e9, False), (300e9, True)):
        points = [{"dtype": "fp32", "flops": 100e9}, {"dtype": "bf16", "flops": flops}]
        save_peaks(home, new_peaks(device_name("cpu")).with_points(PROBE, points))
        levers = diagnose(reading_of(wide), home).levers
        assert any(lever.change == {"layout.precision": "bf16"} for lever in levers) is offered


def test_kernels_that_are_the_time() -> None:
    made = reading_of(window=BUSY | {"roofline": 0.41})
    found = compute(made, None)
    assert found is not None and found.says == "compute-bound at 41% of the measured roofline"
    assert memory_bandwidth(made, None) is None
    rows = tuple(
        Row(name=bound, kind="kernel", calls=1, device_s=seconds, bound=bound)
        for bound, seconds in (("memory", 0.6), ("compute", 0.3))
    )
    profile = Profile(
        source="x", device="cuda", wall_s=1.0, budget={"useful": 0.9}, rows=rows, roofline=Roofline(device="x")
    )
    moved = Reading(source="x", kind="profile", values={"useful_fraction": 0.9}, profile=profile)
    found = memory_bandwidth(moved, None)
    assert found is not None and found.cause == "memory_bandwidth" and compute(moved, None) is None
    assert compute(reading_of(window=BUSY | {"useful": 0.1, "inefficiency": 0.1}), None) is None


def test_shares_of_a_recorded_step_are_those_of_the_whole() -> None:
    assert computing(reading_of(data_wait_s=0.5)) == pytest.approx(0.5)
    assert computing(Reading(source="x", kind="profile")) == 1.0
