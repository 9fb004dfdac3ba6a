"""Which run goes on: the newest unfinished one of the recipe. Edited keys decide; nothing begins silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from armillary.errors import BadInput
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.lease import Lease, write_lease
from armillary.store.runs import Run, list_runs
from armillary.training.checkpoint.resume import Choice, changes_since, unfinished_run
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run

Make = Callable[..., Recipe]
FREE = [
    "train.save_every=3",
    "train.log_every=5",
    "serve.max_running=7",
    "cost.spot=true",
    "traffic.tokens_in=9",
    "data.verify=false",
    "data.workers=2",
]
NOTED = ["train.lr=0.1", "train.steps=13", "layout.precision=bf16", "layout.dp=2"]
DEFINING = ["data.seed=2", "model.ffn=96", "train.seed=4", "train.batch_tokens=512", "train.sequence=64"]


def begin(recipe: Recipe, home: Home) -> ResolvedRun:
    return resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)


def interrupted(begun: ResolvedRun, **options: str) -> Run:
    run = begun.create_run(**options)
    run.update(state="interrupted", step=5)
    return run


@pytest.mark.parametrize("edit", [*FREE, *NOTED])
def test_what_defines_nothing_may_be_edited(edit: str, recipe: Make, home: Home) -> None:
    run = interrupted(begin(recipe(), home))
    (change,) = changes_since(run, recipe(edit), "")
    assert change.key == edit.partition("=")[0] and change.kind == ("free" if edit in FREE else "noted")
    for choice in (Choice(), Choice(name=run.name)):
        assert begin(recipe(edit), home).to_resume(choice) == run


@pytest.mark.parametrize("edit", DEFINING)
def test_what_defines_a_run_stops_the_command(edit: str, recipe: Make, home: Home) -> None:
    run, now = interrupted(begin(recipe(), home)), begin(recipe(edit), home)
    key = edit.partition("=")[0]
    with pytest.raises(BadInput, match=rf"is unfinished \(step 5 of 12\) and the recipe .* \({key} .* with --new$"):
        now.open_run()
    with pytest.raises(BadInput, match=rf"was started with another recipe \({key} .* → .*\); restore it, .*--new"):
        now.open_run(Choice(name=run.name))
    assert list_runs(home) == [run], "nothing began"
    assert now.open_run(Choice(new=True)) != run


def test_another_recipe_file_is_another_recipe(recipe: Make, home: Home) -> None:
    run = interrupted(begin(recipe(), home), file="/here/a.toml")
    edited = begin(recipe("train.seed=4"), home)
    assert edited.to_resume(Choice(file="/here/b.toml")) is None
    with pytest.raises(BadInput, match="--new"):
        edited.to_resume(Choice(file="/here/a.toml"))
    assert begin(recipe("train.lr=1"), home).to_resume(Choice(file="/here/b.toml")) == run, "nothing defining differs"


def test_other_weights_are_another_run(recipe: Make, home: Home) -> None:
    run = interrupted(begin(recipe(), home))
    assert unfinished_run(home, recipe(), "/some/weights") is None
    assert [change.kind for change in changes_since(run, recipe(), "/some/weights")] == ["defining"]


def test_failed_and_died_runs_go_on_and_finished_ones_do_not(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).create_run()
    assert unfinished_run(home, recipe(), "") is None, "this very process runs it"
    run.update(state="failed", error="disk full")
    assert unfinished_run(home, recipe(), "") == run
    run.update(state="running")
    write_lease(run.folder, replace(Lease.new(), pid=999_999, born=1, owner=run.owner))
    assert run.state.state == "died" and unfinished_run(home, recipe(), "") == run
    later = begin(recipe(), home).create_run()
    later.update(state="finished", started=later.state.started + 1)
    assert unfinished_run(home, recipe(), "") is None, "the newest of the recipe is done: a new one starts"
    assert begin(recipe(), home).open_run() not in (run, later)


def test_going_on_takes_the_run_over_as_it_is_asked_for_now(recipe: Make, home: Home) -> None:
    run = interrupted(begin(recipe(), home))
    begun = begin(recipe("layout.dp=2", "train.steps=20"), home)
    assert begun.open_run(overrides=["train.steps=20"]) == run
    assert run.state.state == "running" and run.state.steps == 20 and '"dp": 2' in run.plan.read_text()
    assert run.recipe["train"]["steps"] == 20 and run.overrides == ["train.steps=20"]


def test_a_finished_run_goes_on_by_name_when_it_is_given_more_steps(recipe: Make, home: Home) -> None:
    run = begin(recipe(), home).open_run(Choice(name="first-try"))
    assert run.name == "first-try"
    run.update(state="finished", step=12)
    with pytest.raises(BadInput, match=r"is finished; give it more with --set train\.steps=…, or start a new run"):
        begin(recipe(), home).open_run(Choice(name="first-try"))
    assert begin(recipe("train.steps=20"), home).open_run(Choice(name="first-try")) == run
    with pytest.raises(BadInput, match="is there already"):
        begin(recipe(), home).open_run(Choice(name="first-try", new=True))
