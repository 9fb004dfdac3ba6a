"""The demo's size follows from ceilings, here made-up ones, and never from the name of a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from armillary.cli.demo import sizing
from armillary.cli.demo.sizing import (
    BUSY,
    ENOUGH_STEPS,
    LEAST_STEPS,
    SIZES,
    TRAIN_S,
    answer_s,
    choose,
    fit,
    rounded,
)
from armillary.cli.demo.state import DemoState
from armillary.cli.output import Output
from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.planning.serving.deployment_options import server_of
from armillary.planning.serving.serving_plan import serving_request
from armillary.spec.arithmetic.params import parameters
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, save_peaks


def ceilings(name: str, fp32: float, bf16: float, memory: float, attention: float, launch_s: float) -> Peaks:
    peaks = new_peaks(name).with_points(
        "gemm",
        [
            {"m": size, "n": size, "k": size, "dtype": dtype, "flops": flops}
            for dtype, flops in (("fp32", fp32), ("bf16", bf16))
            for size in (512, 1024)
        ],
    )
    peaks = peaks.with_points("copy", [{"bytes": 1 << 30, "bytes_per_s": memory}])
    rows = [
        {"keys": keys, "head_dim": 64, "dtype": dtype, "backward": backward, "flops": attention}
        for keys in (128, 2048)
        for dtype in ("fp32", "bf16")
        for backward in (False, True)
    ]
    peaks = peaks.with_points("attention", rows)
    passes = [{"dtype": kind, "tokens": 1, "bytes_per_s": memory / 2} for kind in ("fp32", "bf16")]
    peaks = peaks.with_points("passes", passes)
    peaks = peaks.with_points("launch", [{"seconds": launch_s}])
    between = {"op": "all_reduce", "world": 2, "alpha_s": 2e-4, "bytes_per_s": memory / 20}
    return peaks.with_points("collective", [between])


def made(home: Home, *overrides: str, **rates: float) -> DemoState:
    """The demo as it would be on a CPU with these ceilings."""
    for threads in (1, 2):
        save_peaks(home, ceilings(device_name("cpu", threads=threads), **rates))
    save_peaks(home, ceilings(device_name("cpu"), **rates))
    state = DemoState(Output("silent"), home, overrides)
    fit(state)
    return state


SLOW = {"fp32": 70e9, "bf16": 0.25e9, "memory": 15e9, "attention": 20e9, "launch_s": 2.5e-6}
QUICK = {"fp32": 2e12, "bf16": 16e12, "memory": 300e9, "attention": 2e12, "launch_s": 1e-6}


def test_slow_cores_get_the_smallest_model_and_fewer_steps_than_quick_ones(home: Home, tmp_path) -> None:  # type: ignore[no-untyped-def]
    slow, quick = made(home, **SLOW), made(Home.at(tmp_path / "other"), **QUICK)
    assert slow.recipe.model.name == "armillary-5m" and quick.recipe.model.name != "armillary-5m"
    assert slow.recipe.train.steps < 400
    assert quick.recipe.train.batch_tokens > slow.recipe.train.batch_tokens
    for state in (slow, quick):
        assert parameters(state.recipe.model_config()).total >= 4_000_000
        planned = sizing.step_s(state, state.overrides) * state.recipe.train.steps
        assert 0.9 * TRAIN_S < planned < 1.1 * TRAIN_S


def test_traffic_keeps_the_server_busy_for_a_part_of_its_time(home: Home) -> None:
    state = made(home, **SLOW)
    recipe = state.recipe
    request = serving_request(recipe, recipe.model_config(), recipe.cluster(here()), home)
    server = server_of(request, recipe.layout)
    assert recipe.traffic.requests_per_s * answer_s(server) == pytest.approx(BUSY, rel=0.1)
    assert recipe.objective.ttft_p99_s == pytest.approx(server.alone_s, rel=0.1)


def test_what_a_person_says_goes_before(home: Home) -> None:
    state = made(home, "train.steps=7", "traffic.requests_per_s=3", "model.name=armillary-2m", **QUICK)
    assert state.recipe.train.steps == 7 and state.recipe.traffic.requests_per_s == 3
    assert state.recipe.model.name == "armillary-2m"


@pytest.mark.parametrize(
    ("price", "size", "steps"),
    [
        (lambda one: 1e-3, SIZES[0], 85_000),
        (lambda one: float("inf") if one is SIZES[0] else 0.5, SIZES[1], 170),
        (lambda one: 1.4, SIZES[-1], 61),
        (lambda one: 60.0, SIZES[-1], LEAST_STEPS),
    ],
)
def test_the_largest_that_leaves_enough_steps(
    price: Callable[[sizing.Size], float], size: sizing.Size, steps: int
) -> None:
    assert choose(SIZES, price) == (size, steps)
    assert ENOUGH_STEPS > LEAST_STEPS


def test_figures_have_two_digits() -> None:
    assert [rounded(value) for value in (123.4, 0.04567, 9.96)] == [120.0, 0.046, 10.0]
