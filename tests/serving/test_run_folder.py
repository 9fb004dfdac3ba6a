"""A server leaves a run folder that a diagnosis reads while it serves, and says on /metrics what it is set to."""

from __future__ import annotations

from pathlib import Path

from armillary.diagnosis.readings.run_folder import read_run
from armillary.store.home import Home
from armillary.store.runs import list_runs
from tests.serving.tiny import Server


def test_what_is_served_is_recorded_in_a_run(server: Server, folder: Path) -> None:
    home = Home.at(folder.parent)
    told = next(line for line in server.get("/metrics")[1].splitlines() if line.startswith("armillary_serve_info{"))
    run = next(run for run in list_runs(home) if f'run="{run.id}"' in told)
    assert 'kv_bytes="20000000"' in told and 'max_running="256"' in told
    asked = {"prompt": "def main(): return 0123456789 " * 3, "max_tokens": 5}
    for _ in range(3):
        assert server.post("/v1/completions", asked)[0] == 200
    server.until(lambda: run.gauges.is_file() and run.gauges.read_text().count('"request"') >= 3)
    reading = read_run(run, home)
    assert reading.kind == "serving" and reading.plan is not None and reading.plan.serve is not None
    assert reading.plan.serve.kv_bytes == 20_000_000 and reading.plan.weights == str(folder)
    assert run.state.is_running and run.recipe["model"] == {"path": str(folder)} and "train" not in run.recipe
    last = [one for one in reading.requests if one["tokens_out"] == 5][-1]
    assert last["repeated_tokens"] > 0 and last["arrived_s"] > 0 and reading.get("prefix_repeated_total") is not None
