"""Runs that an outside process attacks at random times: every failure is noticed, and the final weights are those of
the uninterrupted run, bit for bit. benchmarks/chaos.py does the same for many rounds.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.planning.cost.measured_failures import measured_failures
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.gauges import read_gauges
from armillary.store.goodput import account_of_run
from armillary.store.home import Home
from armillary.store.run_events import read_events
from armillary.store.runs import Run, find_run
from armillary.training.checkpoint.checkpoint import saved_steps
from armillary.training.checkpoint.peer_copies import memory_run
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from tests.attacker import is_alive, ranks_of
from tests.chaos import SCENARIOS, Chaos, killed, steps_lost, unreliable_store, weights_digest
from tests.conftest import Ran
from tests.fork_server import ForkServer, start_process
from tests.ranks import Ranks

Make = Callable[..., Recipe]
EVERY = 5
SETTINGS = ("layout.micro_batch=1", f"train.save_every={EVERY}", "train.eval_every=0", "train.max_restarts=100")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    store = unreliable_store(tmp_path_factory.mktemp("plugin") / "store")
    with ForkServer({"PYTHONPATH": str(store)}) as made:
        yield made


def train_whole(plan: str, folder: str) -> None:
    train(Plan.from_json(plan), Run(folder=Path(folder)))


def uninterrupted(made: Recipe, home: Home, ranks: Ranks, *, size: int) -> str:
    """The digest of the weights that an uninterrupted run ends with."""
    begun = resolve_run(made, home, model_source(made, home), cpu_ranks=size)
    begun.prepare()
    ranks.run(size, train_whole, begun.plan.to_json(), str(begun.create_run(name="whole").folder), timeout_s=600)
    return weights_digest(home, "whole")


def arena(made: Recipe, home: Home, start: Callable[..., object], *, size: int) -> Chaos:
    path = home.work / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(made))
    return Chaos(recipe=path, home=home, start=start, ranks=size)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_killed_twice(recipe: Make, home: Home, ranks: Ranks, fork_server: ForkServer) -> None:
    made = recipe(*SETTINGS, "layout.dp=2", "train.steps=40")
    whole = uninterrupted(made, home, ranks, size=2)
    (done,) = killed(arena(made, home, fork_server.start, size=2), "killed", seed=3, count=2, gap_s=1.0)
    assert done.strikes and weights_digest(home, "killed") == whole
    assert max(steps_lost(done.folder), default=0) < 2 * EVERY


@pytest.mark.slow
def test_without_restarts_a_killed_rank_takes_the_others_down_and_the_last_checkpoint_stays(
    recipe: Make, home: Home, server: ForkServer, cli: Callable[..., Ran]
) -> None:
    made = recipe("train.steps=2000", "train.eval_every=0", "train.save_every=1", "layout.dp=2", "train.max_restarts=0")
    chaos = arena(made, home, server.start, size=2)
    training = chaos.begin("killed")
    while not (folders := list(home.runs.glob("*killed"))) or len(Run(folder=folders[0]).checkpoint_steps()) < 2:
        assert is_alive(training.pid), training.err
        time.sleep(0.02)
    victims = ranks_of(training.pid)
    os.kill(victims[1], signal.SIGKILL)
    assert training.wait() == 2 and len(victims) == 2
    err, run = training.err, find_run(home, "killed")
    assert err.count("error:") == 1 and "Traceback" not in err and "elastic" not in err
    assert re.search(r"error: rank 1 was killed by signal 9 .*continues from the last checkpoint", err)
    assert run.state.state == "failed" and saved_steps(run), "no half checkpoint counts"
    assert not any(is_alive(pid) for pid in victims)
    again = cli("train", str(chaos.recipe), "--devices", "1", "--set", "train.until=loss=100")
    assert again.code == 0 and f"continues run {run.id} from step" in again.out


@pytest.mark.slow
def test_four_ranks_killed_at_twenty_random_moments(recipe: Make, home: Home, ranks: Ranks, server: ForkServer) -> None:
    made = recipe(*SETTINGS, "layout.dp=4", "train.steps=400")
    whole = uninterrupted(made, home, ranks, size=4)
    (done,) = killed(arena(made, home, server.start, size=4), "killed", seed=1, count=20, gap_s=3)
    assert len(done.strikes) == 20, f"the run ended after {len(done.strikes)}"
    assert weights_digest(home, "killed") == whole
    assert max(steps_lost(done.folder), default=0) < 2 * EVERY


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "flip", "fill", "store"])
def test_other_failures_are_noticed_and_lose_nothing(
    fault: str, recipe: Make, home: Home, ranks: Ranks, server: ForkServer
) -> None:
    made = recipe(*SETTINGS, "layout.dp=4", "train.steps=100")
    whole = uninterrupted(made, home, ranks, size=4)
    rounds = SCENARIOS[fault](arena(made, home, server.start, size=4), "struck", seed=2, count=1, gap_s=3)
    assert any(each.strikes for each in rounds), "the run ended before the attack"
    assert weights_digest(home, "struck") == whole
    assert max(steps_lost(rounds[-1].folder), default=0) <= 2 * EVERY


@pytest.mark.slow
def test_a_lost_rank_comes_back_from_memory_in_seconds(
    recipe: Make, home: Home, ranks: Ranks, server: ForkServer
) -> None:
    """From the moment its death is seen to the end of the next optimizer step; forks import nothing."""
    made = recipe(*SETTINGS, "layout.dp=4", "layout.zero=3", "train.steps=150", "train.save_every=0")
    made = replace(made, train=replace(made.train, peer_copy_every=EVERY))
    whole = uninterrupted(made, home, ranks, size=4)
    training = arena(made, home, server.start, size=4).begin("killed")
    while not (folder := list(home.runs.glob("*killed"))) or not memory_run(Run(folder=folder[0])).checkpoint_steps():
        assert is_alive(training.pid), training.err
        time.sleep(0.02)
    os.kill(ranks_of(training.pid)[2], signal.SIGKILL)
    assert training.wait() == 0 and "which is still in memory" in training.err, training.err
    assert weights_digest(home, "killed") == whole
    events, run = read_events(folder[0]), find_run(home, "killed")
    failed = next(n for n, event in enumerate(events) if event.event == "failed")
    resumed = next(event for event in events[failed:] if event.event == "steps")
    step = next(record for record in read_gauges(run.gauges) if record["step"] == resumed.number("step"))
    assert resumed.number("step") >= EVERY
    recovery_s = resumed.time - events[failed].time + step["step_s"]
    print(f"recovered in {recovery_s:.2f} s")
    assert recovery_s < 10


@pytest.mark.slow
def test_three_kills_in_one_account(recipe: Make, home: Home, ranks: Ranks) -> None:
    """With real starts, imports included: where the time went, and the goodput that the measured rates predict."""
    made = recipe(*SETTINGS, "layout.dp=4", "train.steps=1000", "train.save_every=50")
    whole = uninterrupted(made, home, ranks, size=4)
    (done,) = killed(arena(made, home, start_process, size=4), "killed", seed=1, count=3, gap_s=25)
    assert weights_digest(home, "killed") == whole
    account = account_of_run(find_run(home, "killed"), now=time.time())
    assert account is not None and account.num_failures == done.restarts == len(done.strikes) == 3
    assert sum(account.share(part) for part in account.seconds) == pytest.approx(1, abs=0.005)
    assert account.share("other") <= 0.01 and account.seconds["idle"] == 0
    assert sum(share for _, share, _ in account.amdahl()) == pytest.approx(1)
    found = measured_failures(account)
    assert found is not None
    print(found.goodput_text(), account.rows(), sep="\n")
    assert found.as_run.goodput_fraction == pytest.approx(found.measured_fraction, rel=0.1), account.rows()
