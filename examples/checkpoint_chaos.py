"""Checkpoint chaos: kill -9 during training and while a checkpoint is written; is the resumed run the same to the bit?

    python examples/checkpoint_chaos.py             two minutes; writes checkpoint_chaos/table.md and plot.svg
    python examples/checkpoint_chaos.py --quick     one kill of one rank

Two ranks train a small model; an outside process that knows nothing of the run strikes. The same tools attack the
trainer in its tests and in benchmarks/chaos.md. docs/exercises/checkpoint_chaos.md says what to predict first.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exercise import finish, read_options, table

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests/ is

import armillary
from armillary.report.charts import lines
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.store.home import Home
from armillary.store.run_events import read_events
from armillary.store.runs import find_run
from armillary.units import seconds_text
from tests.chaos import Chaos, Round, flip_a_bit, steps_lost, weights_digest
from tests.fork_server import ForkServer

STEPS, SAVE_EVERY, RANKS = 100, 10, 2
WHOLE = "whole"
RECIPE = {
    "model": {"name": "armillary-2m", "vocab": 512, "context": 128},
    "hardware": {"on": "here"},
    "data": {"source": str(Path(armillary.__file__).parent / "spec"), "vocab": 512},
    "layout": {"precision": "fp32", "micro_batch": 1, "dp": RANKS},
    "train": {
        "sequence": 64,
        "batch_tokens": 64 * RANKS,
        "steps": STEPS,
        "eval_every": 0,
        "save_every": SAVE_EVERY,
        "profile_every": 0,
        "compile": False,
        "max_restarts": 100,
    },
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run under attack: its rounds (starts of the command), and what they came to."""

    attack: str
    run: str
    rounds: list[Round]
    seconds: float

    @property
    def folder(self) -> Path:
        return self.rounds[-1].folder

    @property
    def struck(self) -> str:
        met = Counter(strike.phase for each in self.rounds for strike in each.strikes)
        return ", ".join(f"{phase} {count} ×" if count > 1 else phase for phase, count in met.items()) or "nothing"

    @property
    def starts(self) -> str:
        again = sum(each.restarts for each in self.rounds)
        return f"{len(self.rounds)} command{'s' * (len(self.rounds) > 1)}, {again} restart{'s' * (again != 1)}"


# --- attacks: each trains until the run has finished


def rank_killed(chaos: Chaos, run: str, gap_s: float) -> list[Round]:
    """SIGKILL to a random rank, three times; the launcher starts the ranks again."""
    return [chaos.train(run, action="kill", seed=4, count=3, gap_s=gap_s)]


def all_killed(chaos: Chaos, run: str, gap_s: float) -> list[Round]:
    """SIGKILL to the launcher and all ranks, twice; the same command resumes the run."""
    return until_done(chaos, run, ["power", "power"], gap_s)


def killed_while_saving(chaos: Chaos, run: str, gap_s: float) -> list[Round]:
    """The same at the moment when a checkpoint is on its way to the disk, twice."""
    return until_done(chaos, run, ["save", "save"], gap_s)


def bit_flipped(chaos: Chaos, run: str, gap_s: float) -> list[Round]:
    """Everything is killed while it saves, and then one bit of the newest complete checkpoint flips on the disk."""
    rounds: list[Round] = []
    while not rounds or (rounds[-1].code and not find_run(chaos.home, run).checkpoint_steps()):
        rounds.append(chaos.train(run, action="save", seed=2 + len(rounds), gap_s=gap_s))
    flip_a_bit(find_run(chaos.home, run), seed=1)
    return [*rounds, chaos.train(run)]


def until_done(chaos: Chaos, run: str, actions: list[str], gap_s: float) -> list[Round]:
    rounds: list[Round] = []
    for number, action in enumerate(actions):
        rounds.append(chaos.train(run, action=action, seed=number + 1, gap_s=gap_s))
        if rounds[-1].code == 0:  # it was quicker than the attack
            return rounds
    return [*rounds, chaos.train(run)]


Attack = Callable[[Chaos, str, float], list[Round]]
ATTACKS: dict[str, Attack] = {
    "kill −9 to one rank, 3 ×": rank_killed,
    "kill −9 to all, 2 ×": all_killed,
    "kill −9 to all while it saves, 2 ×": killed_while_saving,
    "… once, then a bit flips": bit_flipped,
}


def quick_kill(chaos: Chaos, run: str, gap_s: float) -> list[Round]:
    return [chaos.train(run, action="kill", seed=4, count=1, gap_s=gap_s)]


# --- what it came to


def differing(chaos: Chaos, run: str, steps: int) -> str:
    """Of the tensors of the last checkpoint (weights, optimizer states), those that differ from the whole run's, as
    `armillary checkpoints diff` has it."""
    line = ["checkpoints", "diff", WHOLE, str(steps), str(steps), "--other", run, "--json"]
    command = chaos.start([*line, "--home", str(chaos.home.work)], chaos.home.work / f"diff-{run}")
    assert command.wait() == 0, command.err
    tensors = json.loads(command.out)["tensors"]
    return f"{sum(1 for each in tensors.values() if each['relative'] != 0)} of {len(tensors)}"


def progress(outcome: Outcome) -> list[tuple[float, float]]:
    """(seconds since the run was created, complete steps) from the run's own account."""
    events = read_events(outcome.folder)
    begin = events[0].time
    points, step = [(0.0, 0.0)], 0.0
    for event in events:
        if event.event == "steps":
            points.append((event.time - begin, step))
            step = event.number("step")
        points.append((event.time - begin, step))
    return points


def attacked(chaos: Chaos, number: int, attack: str, train: Attack, gap_s: float) -> Outcome:
    begin, run = time.perf_counter(), f"attacked-{number}"
    rounds = train(chaos, run, gap_s)
    assert rounds[-1].code == 0, rounds[-1].err
    outcome = Outcome(attack=attack, run=run, rounds=rounds, seconds=time.perf_counter() - begin)
    print(f"{attack}: {outcome.starts}, struck while {outcome.struck}", flush=True)
    return outcome


def row(chaos: Chaos, outcome: Outcome, steps: int) -> tuple[str, ...]:
    set_aside = sum("is damaged" in each.err for each in outcome.rounds)
    lost = steps_lost(outcome.folder)
    same = weights_digest(chaos.home, outcome.run) == weights_digest(chaos.home, WHOLE)
    return (
        outcome.attack,
        outcome.struck,
        outcome.starts + (f", {set_aside} checkpoint set aside" if set_aside else ""),
        ", ".join(str(each) for each in lost) or "none",
        seconds_text(outcome.seconds),
        differing(chaos, outcome.run, steps),
        "yes" if same else "NO",
    )


def main() -> None:
    options = read_options("checkpoint_chaos", __doc__)
    attacks, steps = ({"kill −9 to one rank": quick_kill}, 20) if options.quick else (ATTACKS, STEPS)
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        recipe = Path(folder) / "chaos.toml"
        recipe.write_text(to_toml(recipe_from_dict(RECIPE, [f"train.steps={steps}"])))
        chaos = Chaos(recipe=recipe, home=Home.at(Path(folder) / "home"), start=server.start, ranks=RANKS)
        chaos.train("warm-up", "train.steps=1")  # the server imports torch, the text becomes shards
        begin = time.perf_counter()
        rounds = [chaos.train(WHOLE)]
        assert rounds[0].code == 0, rounds[0].err
        whole = Outcome(attack="nothing", run=WHOLE, rounds=rounds, seconds=time.perf_counter() - begin)
        print(f"the whole run took {seconds_text(whole.seconds)}", flush=True)
        gap_s = whole.seconds / 3
        outcomes = [whole]
        outcomes += [attacked(chaos, i, name, train, gap_s) for i, (name, train) in enumerate(attacks.items())]
        rows = [row(chaos, outcome, steps) for outcome in outcomes]
        series = [(outcome.attack, progress(outcome)) for outcome in outcomes]
    heads = ("attack", "struck while", "started", "steps lost at each", "took")
    heads += ("tensors that differ", "same weights, bit for bit")
    text = f"{steps} steps on {RANKS} ranks, a checkpoint every {SAVE_EVERY}:\n\n" + table(heads, rows)
    chart = lines(series, label="Complete steps over seconds, by attack", x_name="seconds since the run was created")
    finish(options, text, chart, "complete steps over seconds since the run was created")


if __name__ == "__main__":
    main()
