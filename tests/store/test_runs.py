"""Run folders: made whole, found by name, and honest about their state."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.errors import BadInput, NotFound
from armillary.store import runs
from armillary.store.home import Home
from armillary.store.lease import Lease, write_lease
from armillary.store.runs import Run, create_run, find_run, list_runs
from tests.store.conftest import write_model
from tests.store.victim import kill_at_random

RECIPE = {"model": {"name": "armillary-25m"}, "train": {"steps": 200}}


def test_a_new_run_has_its_recipe_plan_and_state(home: Home) -> None:
    changes, plan = ["train.steps=200"], {"step_s": 1.37}
    run = create_run(home, RECIPE, text="[model]\n", overrides=changes, plan=plan, model="armillary-25m", steps=200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z]+-[a-z]+", run.id)
    assert run.folder == home.runs / run.id
    assert run.id == f"{time.strftime('%Y-%m-%d')}-{run.name}"
    assert (run.recipe, run.overrides) == (RECIPE, ["train.steps=200"])
    assert (run.folder / "recipe.toml").read_text() == "[model]\n"
    assert json.loads(run.plan.read_text()) == {"step_s": 1.37}
    state = run.state
    assert (state.state, state.state, state.is_running) == ("running", "running", True)
    assert (state.model, state.step, state.steps) == ("armillary-25m", 0, 200)
    assert state.started == pytest.approx(time.time(), abs=60)


def test_state_is_changed_field_by_field(home: Home) -> None:
    run = create_run(home, RECIPE, steps=200)
    before = run.state
    run.update(step=120, loss=3.41)
    run.update(state="interrupted")
    state = run.state
    assert (state.state, state.step, state.steps, state.loss) == ("interrupted", 120, 200, 3.41)
    assert state.started == before.started <= before.updated <= state.updated


def test_a_loss_that_became_nan_is_kept(home: Home) -> None:
    run = create_run(home, RECIPE)
    run.update(loss=math.nan)
    assert run.state.loss is not None and math.isnan(run.state.loss)
    json.loads((run.folder / "state.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_a_misspelt_field_is_a_mistake_of_ours(home: Home) -> None:
    with pytest.raises(TypeError):
        create_run(home, RECIPE).update(stop=3)


# --- finding


def test_found_by_id_short_name_and_path(home: Home) -> None:
    run = create_run(home, RECIPE)
    for name in (run.id, run.name, str(run.folder), str(run.folder) + "/"):
        assert find_run(home, name) == run


def test_the_newest_wins_a_short_name_and_comes_first_in_the_list(home: Home) -> None:
    old = _at(home, "2026-11-14-quiet-otter", started=1.0)
    new = _at(home, "2026-11-15-quiet-otter", started=3.0)
    other = _at(home, "2026-11-15-bold-heron", started=2.0)
    assert find_run(home, "quiet-otter") == new
    assert find_run(home, "2026-11-14-quiet-otter") == old
    assert list_runs(home) == [new, other, old]


def test_unknown_names(home: Home) -> None:
    with pytest.raises(NotFound, match=r"^no run 'quiet-otter': there is none in \S+ yet; armillary train starts one$"):
        find_run(home, "quiet-otter")
    _at(home, "2026-11-15-quiet-otter", started=1.0)
    with pytest.raises(NotFound, match=r"^no run 'quiet-oter'; did you mean quiet-otter\? \(armillary runs lists 1\)$"):
        find_run(home, "quiet-oter")
    with pytest.raises(NotFound):
        find_run(home, "x" * 1000)


def test_other_things_in_the_folder_are_not_runs(home: Home) -> None:
    (home.runs / "2026-11-15-half-made").mkdir(parents=True)
    (home.runs / "notes.txt").write_text("")
    assert list_runs(home) == []


def _at(home: Home, run_id: str, started: float) -> Run:
    run = create_run(home, RECIPE)
    run.update(started=started)
    return Run(folder=run.folder.rename(home.runs / run_id))


# --- uniqueness


def test_many_at_once_never_share_a_folder(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: create_run(home, {"i": i}), range(24)))
    assert len({run.id for run in made}) == 24
    assert [run.recipe["i"] for run in made] == list(range(24))


def test_two_that_draw_the_same_name_get_different_runs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(["quiet-otter", "quiet-otter", "bold-heron"])
    monkeypatch.setattr(runs, "new_name", lambda taken: next(draws))
    assert [create_run(home, {"i": i}).name for i in range(2)] == ["quiet-otter", "bold-heron"]
    assert find_run(home, "quiet-otter").recipe == {"i": 0}


def test_short_names_are_not_used_twice_while_there_are_others(home: Home) -> None:
    names = [create_run(home, {}).name for _ in range(30)]
    assert len(set(names)) == 30


# --- living and dead


def test_a_run_whose_process_is_gone_has_died(home: Home) -> None:
    code = (
        "import sys; from armillary.store.home import Home; from armillary.store.runs import create_run\n"
        "run = create_run(Home.at(sys.argv[1]), {}); run.update(step=7); print('ready', flush=True); input()"
    )
    kill_at_random(code, home.work)
    [run] = list_runs(home)
    assert (run.state.state, run.state.state, run.state.is_running, run.state.step) == ("died", "died", False, 7)


def test_a_run_that_ended_well_stays_finished(home: Home) -> None:
    run = create_run(home, RECIPE)
    run.update(state="finished", pid=2**22 + 1)
    assert run.state.state == "finished"


def test_of_an_older_run_on_another_machine_its_own_word_is_taken_for_a_while(home: Home) -> None:
    run = create_run(home, RECIPE)
    (run.folder / "lease.json").unlink()  # as an older version left it
    run.update(host="another-machine", pid=2**22 + 1)
    assert run.state.state == "running"
    run.update(host="another-machine", pid=2**22 + 1, updated=run.state.updated - 2 * 3600)
    assert run.state.state == "died", "but not for ever"


def test_resuming_takes_over_a_run_that_nobody_runs(home: Home) -> None:
    run = create_run(home, RECIPE)
    run.update(state="failed", error="out of memory", step=50)
    state = run.claim().state
    assert (state.state, state.error, state.step) == ("running", "", 50)


def test_resuming_is_refused_while_another_process_runs_it(home: Home) -> None:
    run = create_run(home, RECIPE)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        write_lease(run.folder, replace(Lease.new(), pid=other.pid, born=0))
        run = Run(folder=run.folder)
        with pytest.raises(BadInput, match=rf"is still running \(process {other.pid} on \S+\); stop it first$"):
            run.claim()
        other.kill()
    assert run.claim().state.is_running


def test_a_state_file_spoilt_by_hand_shows_as_unreadable(home: Home) -> None:
    run = create_run(home, RECIPE)
    (run.folder / "state.json").write_text("{")
    assert (run.state.state, list_runs(home)) == ("unreadable", [run])
    assert "state.json is not readable JSON" in run.state.error


def test_a_state_of_a_later_version_is_still_read(home: Home) -> None:
    run = create_run(home, RECIPE)
    table = json.loads((run.folder / "state.json").read_text())
    (run.folder / "state.json").write_text(json.dumps(table | {"mood": "good", "step": 9}))
    assert run.state.step == 9


# --- checkpoints and exports


def test_the_latest_export_is_the_highest_step_that_is_whole(home: Home) -> None:
    run = create_run(home, RECIPE)
    assert run.latest_export() is None
    for step in (50, 200, 100):
        write_model(run.export(step))
    run.export(300).mkdir()
    (run.folder / "export" / ".400.partial-1-1-a-h").mkdir()
    assert run.latest_export() == run.export(200)


def test_checkpoints_in_order(home: Home) -> None:
    run = create_run(home, RECIPE)
    for step in (100, 50, 1000):
        run.checkpoint(step).mkdir()
    Path(run.folder / "checkpoints" / ".2000.partial-1-1-a-h").mkdir()
    assert run.checkpoint_steps() == [50, 100, 1000]


def test_a_run_killed_while_it_is_made_does_not_show(home: Home) -> None:
    code = (
        "import sys; from armillary.store.home import Home; from armillary.store.runs import create_run\n"
        "print('ready', flush=True)\n"
        "while True: create_run(Home.at(sys.argv[1]), {'model': {'name': 'm'}}, text='t', plan={})"
    )
    for _ in range(3):
        kill_at_random(code, home.work)
    for run in list_runs(home):
        assert run.recipe == {"model": {"name": "m"}}
        assert run.plan.is_file() and (run.folder / "recipe.toml").is_file() and (run.folder / "export").is_dir()
