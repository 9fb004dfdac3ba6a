"""Two runs compared: what was predicted, what was obtained, and when a lever is credited with it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.outcome.compare import as_prediction, compare, other_keys, same_requests
from armillary.diagnosis.outcome.diagnosis import FILE, read_diagnosis, save
from armillary.diagnosis.outcome.track_record import log_prediction, path_of, read_record
from armillary.diagnosis.readings.run_folder import read_run
from armillary.errors import ArmillaryError, BadInput
from armillary.spec.recipe import recipe_from_dict, to_dict
from armillary.spec.toml.fields import to_plain
from armillary.store.gauges import GaugeWriter
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from tests.diagnosis.served import requests, served, served_run
from tests.diagnosis.trained import BASE, run_of
from tests.diagnosis.trained import plan_of as planned

plan_of = cache(planned)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def before(home: Home) -> Run:
    return run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)


def after(home: Home, *sets: str, step_s: float = 0.6, count: int = 20) -> Run:
    plan = plan_of(*(sets or ("data.workers=3",)))
    return run_of(home, plan, name=f"bold-heron-{len(list(home.runs.iterdir()))}", step_s=step_s, count=count)


def applied(home: Home, run: Run, recipe: str = "") -> None:
    """Its first lever's prediction, made now."""
    lever = diagnose(read_run(run, home), home).levers[0]
    log_prediction(home, as_prediction(run, lever, at=time.time(), value=1.0, recipe=recipe))


def test_a_lever_that_was_applied_is_held_to_its_word(home: Home) -> None:
    a = before(home)
    applied(home, a, "x.toml")
    (told,) = read_record(home).lines
    assert (told.of, told.value, told.expected) == ("step_s", 1.0, pytest.approx(0.5))
    b = after(home)
    found = compare(a, b, home)
    assert found.predicted == pytest.approx(2.0) and found.obtained == pytest.approx(1 / 0.6) and not found.notes
    assert found.change == {"data.workers": 3} and found.title == "loader workers 0 → 3"
    (kept,) = read_record(home).levers
    assert kept.by == b.id and kept.error == pytest.approx(1 - 1 / 1.2) and kept.recipe == "x.toml"
    compare(a, b, home)
    assert len(read_record(home).lines) == 2, "the same two runs are one outcome"
    compare(a, after(home, step_s=0.5), home)
    assert read_record(home).summary == "2 levers, median error 8%"


def test_a_change_that_nobody_predicted(home: Home) -> None:
    found = compare(before(home), after(home, "data.workers=7"), home)
    assert found.predicted is None and found.error is None and not path_of(home).exists()
    assert found.obtained == pytest.approx(1 / 0.6) and found.notes == ()


def test_a_run_that_went_another_way_is_not_the_lever(home: Home) -> None:
    a = before(home)
    applied(home, a)
    found = compare(a, after(home, "data.workers=4"), home)
    assert found.predicted is None and found.title == "" and found.notes == ()


# --- nothing else may differ


def test_a_lever_is_not_credited_with_other_changes(home: Home) -> None:
    a = before(home)
    applied(home, a)
    others = ("data.workers=3", "layout.micro_batch=4", "train.batch_tokens=262144")
    found = compare(a, after(home, *others, step_s=0.2), home)
    assert found.obtained == pytest.approx(5.0) and found.predicted is None and found.error is None
    assert found.notes == (
        "loader workers 0 → 3 was predicted to bring 2.00 ×, but more differs than that: "
        "layout.micro_batch, train.batch_tokens",
    )
    assert read_record(home).summary == "no lever was measured yet"


def pair(home: Home, *sets: str) -> tuple[Run, Run]:
    """Two runs of one recipe, the second with some keys changed."""
    recipes = (recipe_from_dict(BASE), recipe_from_dict(BASE, sets))
    one, other = (create_run(home, to_dict(recipe), name=name) for recipe, name in zip(recipes, "ab", strict=True))
    return one, other


LEVER = {"data.workers": 3, "train.compile": True}
PULLED = ("data.workers=3", "train.compile=true")


@pytest.mark.parametrize("more", ["train.steps=90", "train.lr=1e-3", "serve.max_running=4", "traffic.tokens_in=9"])
def test_what_leaves_a_step_as_it_is_may_differ(home: Home, more: str) -> None:
    assert other_keys(*pair(home, *PULLED, more), LEVER, "training") == ()


@pytest.mark.parametrize(
    "more",
    [
        "model.vocab=4096",
        "model.rope.theta=1e6",
        "model.name=gpt2",
        "train.eval_every=1",
        "layout.zero=1",
        "hardware.on=h200x8",
        "data.source=other.txt",
    ],
)
def test_what_may_change_a_step_may_not(home: Home, more: str) -> None:
    assert other_keys(*pair(home, *PULLED, more), LEVER, "training") == (more.partition("=")[0],)


def test_a_lever_half_pulled_is_none(home: Home) -> None:
    assert other_keys(*pair(home, "data.workers=3"), LEVER, "training") is None


def test_of_a_server_other_keys_matter(home: Home) -> None:
    runs = pair(home, "serve.max_running=8", "train.sequence=64", "serve.kv_bytes=64_000_000", "layout.tp=2")
    assert other_keys(*runs, {"serve.max_running": 8}, "serving") == ("layout.tp", "serve.kv_bytes")


def test_too_short_a_run_proves_nothing(home: Home) -> None:
    a = before(home)
    applied(home, a)
    b = after(home, count=3)
    assert f"run {b.name} took only 3 steps" in compare(a, b, home).notes[0]
    assert len(read_record(home).lines) == 1


def test_auto_may_have_taken_another_dtype(home: Home) -> None:
    """After ceilings were measured, or a probe on a busy machine."""
    a, plan = before(home), plan_of("data.workers=3")
    applied(home, a)
    assert plan.layout.precision == "bf16" and "precision" not in plan.recipe["layout"]
    b = run_of(home, replace(plan, layout=replace(plan.layout, precision="fp32")), name="wide-heron", step_s=0.6)
    assert "layout.precision=auto took bf16 and then fp32" in compare(a, b, home).notes[0]
    assert len(read_record(home).lines) == 1


# --- said before


def test_what_is_predicted_afterwards_is_no_prediction(home: Home) -> None:
    a, b = before(home), after(home)
    applied(home, a)
    save(a, diagnose(read_run(a, home), home), home)
    found = compare(a, b, home)
    assert found.predicted is None and f"only after run {b.name} had begun" in found.notes[0]
    assert read_record(home).summary == "no lever was measured yet"


def test_a_diagnosis_that_was_kept_is_a_prediction_too(home: Home) -> None:
    a = before(home)
    save(a, diagnose(read_run(a, home), home), home)
    b = after(home)
    assert compare(a, b, home).predicted is None, "within the same second nobody knows which was first"
    b.update(started=time.time() + 2)
    assert compare(a, b, home).predicted == pytest.approx(2.0)
    assert read_record(home).summary == "1 lever, median error 17%"


def test_a_second_look_does_not_rewrite_the_first(home: Home) -> None:
    a = before(home)
    first = diagnose(read_run(a, home), home)
    save(a, first, home)
    with GaugeWriter(a.gauges) as writer:
        writer.write({"step_s": 0.7, "data_wait_s": 0.1}, step=20, now=time.time() + 5)
    second = diagnose(read_run(a, home), home)
    save(a, second, home)
    assert read_diagnosis(a.folder) == second != first, "more was measured, and nothing applied"
    save(a, first, home)
    assert read_diagnosis(a.folder) == first, "its last step is newer than the verdict"
    applied(home, a)
    save(a, second, home)
    assert read_diagnosis(a.folder) == first, "a lever was applied"


def test_what_was_measured_once_is_judged_once(home: Home) -> None:
    a = before(home)
    first = diagnose(read_run(a, home), home)
    save(a, first, home)
    save(a, diagnose(read_run(after(home), home), home), home)
    assert read_diagnosis(a.folder) == first
    (a.folder / FILE).write_text("{torn")
    save(a, first, home)
    assert read_diagnosis(a.folder) == first, "a broken one is no prediction"


# --- servers


def server(home: Home, count: int, *, tokens_in: int = 64, **serve: Any) -> Run:
    return served_run(home, served(requests(count, tokens_in=tokens_in), **serve), name=f"server-{time.time_ns()}")


def test_servers_are_held_against_each_other_under_the_same_requests(home: Home) -> None:
    a = server(home, 40, max_running=4)
    lever = diagnose(read_run(a, home), home).levers[0]
    log_prediction(home, as_prediction(a, lever, at=time.time()))
    rows = lever.change["serve.max_running"]
    for count in (40, 42):
        assert compare(a, server(home, count, max_running=rows), home).predicted == lever.speedup
    for count, tokens_in in ((80, 64), (40, 256)):
        found = compare(a, server(home, count, tokens_in=tokens_in, max_running=rows), home)
        assert found.predicted is None
        assert found.notes[0].startswith(f"other requests came: 40 of 47 + 46 tokens against {count} of ")


def test_a_rate_that_stays_is_the_same_load_however_long_it_lasts(home: Home) -> None:
    short, long, quick = (
        [dict(arrived_s=i / rate, tokens_in=64, tokens_out=32) for i in range(count)]
        for count, rate in ((50, 5.0), (100, 5.0), (100, 9.0))
    )
    assert same_requests(short, long) and not same_requests(short, quick) and same_requests(long, quick)


# --- bad input


def test_runs_that_cannot_be_compared_are_one_line(home: Home) -> None:
    a = before(home)
    with pytest.raises(BadInput, match="run quiet-otter cannot be compared with itself; name the run with"):
        compare(a, Run(folder=a.folder / ".." / a.folder.name), home)
    empty = create_run(home, plan_of().recipe, plan=to_plain(plan_of()), name="empty")
    with pytest.raises(ArmillaryError, match=r"no gauges at .*has not taken a step yet"):
        compare(a, empty, home)
    empty.gauges.write_text("")
    with pytest.raises(BadInput, match="run empty has measured nothing yet; wait"):
        compare(a, empty, home)
    empty.gauges.write_text('{"time":1,"step":0,"loss":3}\n')
    with pytest.raises(BadInput, match="step_s was not measured in both runs"):
        compare(a, empty, home)
    with pytest.raises(BadInput, match=r"is training and run .* is serving; compare two of a kind"):
        compare(a, server(home, 8), home)
