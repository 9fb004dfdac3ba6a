"""Chaos: rounds of a run on four gloo ranks that an outside process kills at random, each against the same whole run.

    python -m benchmarks.chaos --rounds 200 --seed 1 [--out benchmarks/chaos.md]

Every round draws its own seed; a round that does not end with the weights of the whole run, bit for bit, is a failure
and is named with its seed, so that it can be run again alone: --rounds 1 --seed SEED.
"""

import argparse
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

from armillary.machine.machine import here
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.store.goodput import GoodputAccount, account_of_run
from armillary.store.home import Home
from armillary.store.runs import find_run
from tests.chaos import train_under_fire, weights_digest

RECIPE = {
    "model": {
        "name": "armillary-2m",
        "num_layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 128,
        "vocab": 320,
        "head_dim": 16,
        "context": 128,
    },
    "hardware": {"on": "here"},
    "data": {"held_out": 0.1},
    "layout": {"precision": "fp32", "micro_batch": 2, "dp": 4},
    "train": {
        "sequence": 64,
        "batch_tokens": 1024,
        "steps": 300,
        "eval_every": 0,
        "save_every": 10,
        "profile_every": 0,
        "max_restarts": 1000,
    },
}
HEADS = ("seed", "kills", "restarts", "took", "useful", "repeated", "restarting", "other", "sum", "same weights")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="armillary-chaos-") as folder:
        home, recipe = Home.at(Path(folder) / "home"), _recipe(Path(folder))
        whole = train_under_fire(recipe, home, "whole", seed=0, kills=0, gap_s=0)
        assert whole.code == 0, whole.err
        rows = []
        for number in range(options.rounds):
            rows.append(_round(recipe, home, number, options))
            print(" ".join(f"{head} {cell}" for head, cell in zip(HEADS, rows[-1], strict=True)), flush=True)
    text = _page(rows, options)
    if options.out:
        options.out.write_text(text)
    print(text)
    raise SystemExit(any(row[-1] != "yes" for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each has the next number")
    parser.add_argument("--kills", type=int, default=3, help="per round")
    parser.add_argument("--gap-s", type=float, default=20.0, help="longest time between two kills")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


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


def _round(recipe: Path, home: Home, number: int, options: argparse.Namespace) -> list[str]:
    name, seed = f"round-{number}", options.seed + number
    begin = time.perf_counter()
    done = train_under_fire(recipe, home, name, seed=seed, kills=options.kills, gap_s=options.gap_s)
    took = time.perf_counter() - begin
    account = account_of_run(find_run(home, name), now=time.time())
    assert account is not None
    same = done.code == 0 and weights_digest(home, name) == weights_digest(home, "whole")
    if not same:
        print(done.err)
    return [str(seed), str(len(done.kills)), str(done.err.count("start again")), f"{took:.0f} s", *_shares(account),
            "yes" if same else f"NO (exit code {done.code})"]  # fmt: skip


def _shares(account: GoodputAccount) -> list[str]:
    parts = [account.share("useful"), account.share("repeated"), account.share("restarting"), account.share("other")]
    return [f"{part:.1%}" for part in (*parts, sum(account.share(part) for part in account.seconds))]


def _page(rows: list[list[str]], options: argparse.Namespace) -> str:
    kept = sum(row[-1] == "yes" for row in rows)
    lines = [
        "# Chaos: ranks killed at random",
        "",
        f"{date.today()}, {here().text()}, Python {platform.python_version()}, 4 gloo ranks. Each round is "
        f"`armillary train` with a checkpoint every 10 of 300 steps; an outside process sends SIGKILL to a random rank "
        f"{options.kills} times, at gaps drawn uniformly from 0 to {options.gap_s:g} s, whatever the ranks do then. "
        f"{kept} of {len(rows)} rounds ended with the weights of the whole run, bit for bit.",
        "",
        f"    python -m benchmarks.chaos --rounds {options.rounds} --seed {options.seed} --kills {options.kills} "
        f"--gap-s {options.gap_s:g}",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
