"""Which run goes on: the newest unfinished one of the same recipe, on whatever hardware and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from armillary.errors import BadInput
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.training.resume import differences, unfinished_run
from armillary.training.start import Start, start, starting_point

Make = Callable[..., Recipe]


def begin(recipe: Recipe, home: Home) -> Start:
    return start(recipe, home, starting_point(recipe, home), room=4)


def test_an_interrupted_run_of_the_same_recipe_goes_on(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).create_run()
    assert unfinished_run(home, recipe(), "") is None, "this very process runs it"
    run.update(state="interrupted", step=5)
    reading = ["data.verify=false", "data.workers=2"]
    for same in ([], ["layout.dp=2"], ["layout.precision=bf16", "layout.recompute=full"], reading):
        assert unfinished_run(home, recipe(*same), "") == run
    for other in (["train.lr=0.1"], ["data.seed=2"], ["model.ffn=96"], ["train.steps=13"]):
        assert unfinished_run(home, recipe(*other), "") is None
        assert differences(run, recipe(*other), "") == [other[0].partition("=")[0]]
    assert unfinished_run(home, recipe(), "/some/weights") is None


def test_failed_and_died_runs_go_on_and_finished_ones_do_not(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).create_run()
    run.update(state="failed", error="disk full")
    assert unfinished_run(home, recipe(), "") == run
    run.update(state="running", pid=999_999, born=1)
    assert run.state.shown == "died" and unfinished_run(home, recipe(), "") == run
    later = begin(recipe(), home).create_run()
    later.update(state="finished", started=later.state.started + 1)
    assert unfinished_run(home, recipe(), "") is None, "the newest of the recipe is done: a new one starts"


def test_going_on_takes_the_run_over_with_a_new_plan(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).create_run()
    run.update(state="interrupted")
    begun = begin(recipe("layout.dp=2"), home)
    assert begun.open_run() == run
    assert run.state.shown == "running" and '"dp": 2' in run.plan.read_text()
    assert begin(recipe("train.steps=3"), home).open_run() != run


def test_a_named_run_must_be_the_same(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).open_run(name="first-try")
    assert run.name == "first-try"
    run.update(state="interrupted")
    with pytest.raises(BadInput, match=r"was started with another recipe \(train.lr differs\); put that back"):
        begin(recipe("train.lr=0.1"), home).open_run(name="first-try")
    assert begin(recipe(), home).open_run(name="first-try") == run
    run.update(state="finished")
    with pytest.raises(BadInput, match="is finished; leave --run out"):
        begin(recipe(), home).open_run(name="first-try")
