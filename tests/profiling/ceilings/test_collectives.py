"""Collectives: the alpha-beta fit on made-up times, and two real ranks on tiny sizes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadInput, NotFound
from armillary.profiling.ceilings import collective_ranks
from armillary.profiling.ceilings.collective_ranks import OPS, Plan, RanksFailed, run_ranks
from armillary.profiling.ceilings.collectives import SIZES, default_worlds, fit, measure_collectives

CPU = torch.device("cpu")


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e8, 1e12))
def test_a_clean_line_is_found(alpha: float, beta: float) -> None:
    model = fit(SIZES, [alpha + size / beta for size in SIZES])
    assert model.alpha_s == pytest.approx(alpha, rel=1e-3, abs=1e-9)
    assert model.bytes_per_s == pytest.approx(beta, rel=1e-3)
    assert model.alpha_s + 1e6 / model.bytes_per_s == pytest.approx(alpha + 1e6 / beta, rel=1e-3) and model.error < 1e-3


def test_noise_and_a_wild_point_hardly_move_it() -> None:
    draw = np.random.default_rng(0)
    times = [(5e-5 + size / 2e9) * draw.normal(1, 0.03) for size in SIZES]
    times[4] *= 8
    model = fit(SIZES, times)
    assert model.alpha_s == pytest.approx(5e-5, rel=0.15) and model.bytes_per_s == pytest.approx(2e9, rel=0.15)


def test_start_up_is_never_below_nothing() -> None:
    model = fit([1e3, 1e6, 1e9], [1e-9, 1e-3, 1.5])
    assert model.alpha_s == 0.0 and model.bytes_per_s > 0


def test_flat_times_give_a_finite_bandwidth() -> None:
    model = fit([1e3, 1e4, 1e5], [3e-4, 2e-4, 1e-4])
    assert 0 < model.bytes_per_s < float("inf")


def test_two_ranks_give_a_model_of_each_operation() -> None:
    told: list[tuple[int, int, str]] = []
    found = measure_collectives(CPU, worlds=(2,), sizes=(1024, 65536), budget_s=0.001, watch=lambda *s: told.append(s))
    models, times = found.peaks.points["collective"], found.peaks.points["collective_time"]
    assert [point["op"] for point in models] == list(OPS) and len(times) == 2 * len(OPS)
    for point in models:
        assert (point["world"], point["backend"]) == (2, "gloo") and point["alpha_s"] >= 0 < point["bytes_per_s"]
    reduced = next(p for p in times if (p["op"], p["bytes"]) == ("all_reduce", 65536))
    seen = reduced["beside"]
    assert seen["algorithm_bytes_per_s"] == pytest.approx(65536 / reduced["seconds"])
    assert seen["bus_bytes_per_s"] == pytest.approx(seen["algorithm_bytes_per_s"]), "2(n-1)/n is 1 for two ranks"
    assert told[-1] == (12, 12, "send × 2")


def _dies(rank: int, *_: object) -> None:
    os._exit(3)


def test_a_rank_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_ranks, "_rank", _dies)
    plan = Plan(device="cpu", world=2, ops=("send",), sizes=(4, 8), budget_s=0.001)
    with pytest.raises(RanksFailed, match="one of 2 ranks died; try fewer"):
        list(run_ranks(plan))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BadInput, match="1 rank has nobody to talk to"):
        measure_collectives(CPU, worlds=(1,))
    with pytest.raises(BadInput, match="two sizes"):
        measure_collectives(CPU, worlds=(2,), sizes=(1024,))
    with pytest.raises(NotFound, match="did you mean all_reduce"):
        measure_collectives(CPU, worlds=(2,), ops=("allreduce",))


def test_worlds_are_powers_of_two_up_to_the_cores() -> None:
    assert default_worlds(CPU, 1) == (2,)
    assert default_worlds(CPU, 6) == (2, 4)
