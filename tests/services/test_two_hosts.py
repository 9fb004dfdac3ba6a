"""Training on two hosts over ssh: network namespaces with a throttled link; stopped, resumed, the same weights."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from tests.services.small_training import RECIPE, same_weights, write_text
from tests.services.two_hosts import Hosts, two_hosts, why_not

pytestmark = [pytest.mark.services, pytest.mark.skipif(bool(why_not()), reason=why_not())]
ROOT = str(Path(__file__).parents[2])
LONG_S = 1200.0
SENDING = """
[model]
name = "armillary-2m"

[layout]
dp = 2
precision = "fp32"

[data]
source = "{text}"

[train]
sequence = 128
batch_tokens = 1024
steps = 16
save_every = 0
eval_every = 0
profile_every = 0
compile = false
"""
"""a step of which the gradients' all-reduce over a slow link is the larger part"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    environment = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    with two_hosts(tmp_path_factory.mktemp("hosts"), environment) as made:
        made.throttle("200mbit")
        yield made


@pytest.fixture
def armillary(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The command line on the first host, in a folder that both share."""
    write_text(tmp_path / "text")

    def run(*words: str) -> str:
        command = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "armillary", *words]
        command += ["--home", str(tmp_path)]
        done = hosts.run(0, command, cwd=tmp_path, timeout=LONG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    for file in tmp_path.glob("jobs/*/pid-*"):  # what a failed test left running
        with suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGTERM)


def wait_for(armillary: Callable[..., str], done: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    end = time.monotonic() + LONG_S
    while True:
        (facts,) = (each for each in json.loads(armillary("launch", "jobs", "--json")) if each["job"] == "fox")
        if done(facts):
            return dict(facts)
        assert time.monotonic() < end, armillary("launch", "logs", "fox")
        time.sleep(1)


def launch_table(hosts: Hosts) -> str:
    options = json.dumps(list(hosts.ssh_options))
    return f"[launch]\nhosts = {json.dumps(hosts.addresses)}\nssh_options = {options}\n"


def test_two_hosts_train_stop_and_resume(armillary: Callable[..., str], hosts: Hosts, tmp_path: Path) -> None:
    recipe = RECIPE.format(text=tmp_path / "text", steps=300, more="")
    (tmp_path / "r.toml").write_text(recipe + launch_table(hosts))
    start = ("launch", "r.toml", "--on", "ssh", "--nodes", "2", "--run", "fox")
    armillary(*start)
    wait_for(armillary, lambda facts: (facts["step"] or "0")[0] != "0")
    armillary("launch", "cancel", "fox")
    wait_for(armillary, lambda facts: facts["state"] == "cancelled")
    run = json.loads(armillary("runs", "fox", "--json"))
    said = armillary("launch", "logs", "fox")
    assert run["state"] == "interrupted" and 0 < run["step"] < 300 and run["checkpoints"], said
    armillary(*start)
    facts = wait_for(armillary, lambda facts: facts["state"] not in ("running", "pending"))
    log = armillary("launch", "logs", "fox")
    assert facts["state"] == "finished" and facts["where"] == "10.87.0.1, 10.87.0.2", log
    for number, address in enumerate(hosts.addresses):
        assert f"node {number} of 2 is {address}, {address} on link{number}" in log
    assert f"from step {run['checkpoints'][-1]}" in log and "finished after 300 steps" in log
    (tmp_path / "plain.toml").write_text(recipe)
    armillary("train", "plain.toml", "--devices", "2", "--run", "hen")
    assert same_weights(tmp_path, "fox", "hen")


def test_plan_with_the_measured_link(armillary: Callable[..., str], hosts: Hosts, tmp_path: Path) -> None:
    """The pre-flight measures the throttled link, the plan uses it and says so, and steps take as long as planned; what
    ranks waited for their core, because other programs used it, is left out."""
    hosts.throttle("100mbit")
    (tmp_path / "r.toml").write_text(SENDING.format(text=tmp_path / "text") + launch_table(hosts))
    start = ("launch", "r.toml", "--on", "ssh", "--nodes", "2")
    armillary("bench", "ceilings", "--quick")
    network = json.loads(armillary(*start, "--check", "--json"))["probe"]["network"]
    assert 0.7 * 12.5e6 < network["bytes_per_s"] < 1.1 * 12.5e6, network  # 100 Mbit/s
    said = " ".join(armillary(*start, "--run", "fox").split())
    assert "a network: " in said and "as measured (armillary launch --check of" in said, said
    wait_for(armillary, lambda facts: facts["state"] == "finished")
    (run,) = tmp_path.glob("runs/*-fox")
    planned = json.loads((run / "plan.json").read_text())["predicted"]
    steps = [json.loads(line) for line in (run / "gauges.jsonl").read_text().splitlines()][4:]
    wall, queue = (median(step[name] for step in steps) for name in ("step_s", "host_queue_s"))
    measured = median(step["step_s"] - step["host_queue_s"] for step in steps)
    print(f"link {network['bytes_per_s'] / 1e6:.1f} MB/s, {network['latency_s'] * 1e6:.0f} us")
    print(f"step planned {planned['step_s']:.3f} s, measured {measured:.3f} s: {planned['step_s'] / measured - 1:+.0%}")
    print(f"wall time {wall:.3f} s, of which {queue:.3f} s waiting for a core that other programs had")
    assert planned["step_s"] == pytest.approx(measured, rel=0.25)


def test_a_link_slower_than_the_recipe_s_is_named(hosts: Hosts, tmp_path: Path) -> None:
    hosts.throttle("100mbit")
    (tmp_path / "r.toml").write_text(SENDING.format(text=tmp_path) + launch_table(hosts))
    words = ["launch", "r.toml", "--on", "ssh", "--nodes", "2", "--check", "--set", "hardware.network=ethernet-10g"]
    command = [sys.executable, "-m", "armillary", *words, "--home", str(tmp_path)]
    done = hosts.run(0, ["env", f"PYTHONPATH={ROOT}", *command], cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the network between nodes: " in done.stderr and "MB/s" in done.stderr, done.stderr
