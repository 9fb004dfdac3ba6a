"""Plant every problem, diagnose every run, and print what was said beside what is so.

    python -m benchmarks.planted [--only NAME …] [--size 1] [--severity 1] [--seed 0] [--times 2] [--home DIR] [--write]
    python -m benchmarks.planted --draw [SEED]     every problem at a severity from 0.7 to 2 and a seed of its own,
                                                   drawn anew; SEED draws the same again

Runs are made in a folder of their own, which --home keeps; again (up to --times) where something else computed on the
machine meanwhile, so leave it alone. Exit code 1 where too much is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom

import torch

from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, save_peaks
from tests.planted.catalogue import PROBLEMS, chosen
from tests.planted.judge import TIMES, Verdict, holds, judged
from tests.planted.problem import Wish
from tests.planted.recorded import MISSING
from tests.planted.table import as_page, as_text, summary, summary_of_sets, unproven

PAGE = Path(__file__).parent.parent / "planted.md"


def main() -> int:
    asked = _arguments()
    wish = Wish(size=asked.size, severity=asked.severity, seed=asked.seed)
    drawn = SystemRandom().randrange(10**6) if asked.draw == 0 else asked.draw
    if drawn is not None:
        print(f"drawn by {drawn}: --draw {drawn} makes the same again")
    verdicts: list[Verdict] = []
    with ExitStack() as stack:
        folder = asked.home or stack.enter_context(tempfile.TemporaryDirectory(prefix="armillary-planted-"))
        home = Home(work=Path(folder).absolute(), cache=Home.default().cache)
        measure_once(home)
        dice = Random(drawn) if drawn is not None else None
        wishes = {problem.name: draw_wish(dice, wish) for problem in PROBLEMS}  # the same whichever are asked for
        for problem in chosen(asked.only):
            verdicts.append(judged(problem, wishes[problem.name], home, times=asked.times))
            print(as_text(verdicts[-1]), flush=True)
            if asked.explain:
                print(f"    {verdicts[-1].found.headline}", flush=True)
    for name in MISSING if not asked.only else ():
        print(f"{name:19} not recorded: python -m benchmarks.planted.record makes it on a GPU")
    print(
        "\n".join(["", *summary(verdicts), *summary_of_sets(verdicts), f"{sum(one.seconds for one in verdicts):.0f} s"])
    )
    print("\n".join(unproven(verdicts)))
    if asked.write:
        PAGE.write_text(as_page(verdicts, wish, drawn))
    return 0 if holds(verdicts) else 1


def draw_wish(dice: Random | None, wish: Wish) -> Wish:
    """A severity and a seed drawn for one problem; seeds are none of those that thresholds were set on."""
    if dice is None:
        return wish
    return replace(wish, severity=round(2 ** dice.uniform(-0.5, 1.0), 2), seed=dice.randrange(1000, 10**6))


def measure_once(home: Home) -> None:
    """Plans are held against ceilings measured on this machine: seconds, the first time."""
    device = torch.device("cpu")
    if load_peaks(home, name_of(device)) is None:
        home.work.mkdir(parents=True, exist_ok=True)
        save_peaks(home, measure_ceilings(device, quick=True, folder=home.work).peaks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__.split("\n")[0])
    names = ", ".join(problem.name for problem in PROBLEMS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {names}")
    parser.add_argument("--size", type=float, default=1.0, help="2: models twice as wide")
    parser.add_argument("--severity", type=float, default=1.0, help="2: problems twice as bad")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and arrivals")
    parser.add_argument("--draw", type=int, nargs="?", const=0, metavar="SEED", help="severities and seeds anew")
    parser.add_argument("--times", type=int, default=TIMES, help="runs at most, where others compute meanwhile")
    parser.add_argument("--home", help="where runs are kept; default: a folder that is removed")
    parser.add_argument("--explain", action="store_true", help="print each diagnosis' own sentence too")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
