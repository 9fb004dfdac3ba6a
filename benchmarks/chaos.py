"""Chaos: rounds of a run on four gloo ranks that an outside process attacks at random, each against the same whole run.

    python -m benchmarks.chaos [--rounds 200] [--seed 1] [--kills 3] [--gap-s 3]

Every round draws from its own seed. Of ten rounds, six kill ranks one after the other; the others stop a rank, flip a
bit of the newest checkpoint, fill the disk, or lose the machine while every third write to the store fails. A round
that does not end with the weights of the whole run, bit for bit, or in which a failure was not noticed, is marked NO
and can be run alone: --rounds 1 --seed SEED. Rounds that chaos.md has already are not run again.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from string import ascii_uppercase

from armillary.machine.machine import here
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.store.home import Home
from armillary.store.runs import find_run
from tests.chaos import SCENARIOS, Chaos, Round, steps_lost, unreliable_store, weights_digest
from tests.fork_server import ForkServer

PAGE = Path(__file__).with_suffix(".md")
SAVE_EVERY, STEPS = 10, 100
RECIPE = {
    "model": {
        "name": "armillary-2m",
        "num_layers": 1,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 64,
        "vocab": 320,
        "head_dim": 8,
        "context": 128,
    },
    "hardware": {"on": "here"},
    "data": {"held_out": 0.1},
    "layout": {"precision": "fp32", "micro_batch": 1, "dp": 4},
    "train": {
        "sequence": 32,
        "batch_tokens": 128,
        "steps": STEPS,
        "eval_every": 0,
        "save_every": SAVE_EVERY,
        "profile_every": 0,
        "max_restarts": 1000,
    },
}
ORDER = ("stop", "flip", "fill", "store", "kill", "kill", "kill", "kill", "kill", "kill")
HEADS = ("seed", "fault", "struck while", "restarts", "steps repeated, most", "took", "machine", "same weights")


def main() -> None:
    options = _options()
    rows, machines = _recorded()
    letter = _letter(machines, f"{here().text()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="armillary-chaos-") as folder, _server(Path(folder)) as server:
        chaos = Chaos(recipe=_recipe(Path(folder)), home=Home.at(Path(folder) / "home"), start=server.start)
        whole = chaos.train("whole")
        assert whole.code == 0, whole.err
        for seed in range(options.seed, options.seed + options.rounds):
            if seed not in rows:
                *cells, result = _round(chaos, seed, options)
                rows[seed] = [*cells, letter, result]
                print(" ".join(f"{head} {cell}," for head, cell in zip(HEADS, rows[seed], strict=True)), flush=True)
                PAGE.write_text(_page(rows, machines, options))
    raise SystemExit(any(row[-1] != "yes" for row in rows.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each has the next number")
    parser.add_argument("--kills", type=int, default=3, help="per round that kills")
    parser.add_argument("--gap-s", type=float, default=3.0, help="longest time between two strikes")
    return parser.parse_args()


def _recorded() -> tuple[dict[int, list[str]], dict[str, str]]:
    """Rounds of the page as it is, by seed, and the machines they ran on, by letter."""
    lines = PAGE.read_text().splitlines() if PAGE.is_file() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    machines = dict(line[2:].split(": ", 1) for line in lines if line.startswith("- "))
    return {int(row[0]): row for row in rows if row[0].isdigit()}, machines


def _letter(machines: dict[str, str], text: str) -> str:
    """Of this machine, which is added where it is new."""
    known = {each: letter for letter, each in machines.items()}
    letter = known.get(text, ascii_uppercase[len(machines)])
    machines[letter] = text
    return letter


def _server(folder: Path) -> ForkServer:
    return ForkServer({"PYTHONPATH": str(unreliable_store(folder / "plugin"))})


def _recipe(folder: Path) -> Path:
    """A recipe file, and the text that it trains on."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(40):
        lines = [f"def function_{i}_{j}(x):\n    return x + {j}\n" for j in range(12)]
        (corpus / f"{i}.py").write_text("\n".join(lines))
    path = folder / "chaos.toml"
    path.write_text(to_toml(recipe_from_dict(RECIPE, [f"data.source={corpus}"])))
    return path


def _round(chaos: Chaos, seed: int, options: argparse.Namespace) -> list[str]:
    fault, name = ORDER[seed % len(ORDER)], f"round-{seed}"
    begin = time.perf_counter()
    rounds: list[Round] = []
    try:
        rounds = SCENARIOS[fault](chaos, name, seed=seed, count=options.kills, gap_s=options.gap_s)
        result = "yes" if weights_digest(chaos.home, name) == weights_digest(chaos.home, "whole") else "NO"
    except AssertionError as error:
        print(error, flush=True)
        result = "NO, or not noticed"
    row = [str(seed), fault, *_cost(rounds), f"{time.perf_counter() - begin:.0f} s", result]
    if result == "yes":
        shutil.rmtree(find_run(chaos.home, name).folder)
    return row


def _cost(rounds: list[Round]) -> list[str]:
    if not rounds:
        return ["", "", ""]
    met = Counter(strike.phase for each in rounds for strike in each.strikes)
    struck = ", ".join(f"{phase} {count}" if count > 1 else phase for phase, count in met.items())
    lost = steps_lost(rounds[-1].folder)
    return [struck or "nothing: it had ended", str(sum(each.restarts for each in rounds)), str(max(lost, default=0))]


def _page(rows: dict[int, list[str]], machines: dict[str, str], options: argparse.Namespace) -> str:
    held = sum(row[-1] == "yes" for row in rows.values())
    restarts = sum(int(row[3] or 0) for row in rows.values())
    lines = [
        "# Chaos: runs that are attacked at random",
        "",
        f"{date.today()}, 4 gloo ranks that are forks of a process which has imported torch, on several machines:",
        "",
        *(f"- {letter}: {text}" for letter, text in sorted(machines.items())),
        "",
        f"Each round is `armillary train` with a checkpoint every {SAVE_EVERY} of",
        f"{STEPS} steps. An outside process strikes at gaps that it draws uniformly from 0 to {options.gap_s:g} s,",
        f"whatever the ranks do then: `kill` sends SIGKILL to a random rank {options.kills} times, others strike once.",
        f"**{held} of {len(rows)} rounds ended with the weights of the whole run, bit for bit, and noticed each",
        f"failure**; ranks were started again {restarts} times. One save is in flight at a time, so a failure repeats",
        f"fewer than {2 * SAVE_EVERY} steps, and a full disk at most that. A `flip` or `store` round that was struck",
        "before the first checkpoint shows only that the run begins again.",
        "",
        "    python -m benchmarks.chaos    # goes on after the last round below",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
        *("| " + " | ".join(rows[seed]) + " |" for seed in sorted(rows)),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
