"""Errors of the training planner on published rows that its fit has not seen.

    python benchmarks/planning_folds.py published_training.csv

Two kinds of folds: one model of a source is left out, and judged with the factors of the source's other models; a whole
source is left out, and judged with what the other sources have in common. Every fold is fitted in a process of its own
(`--fit`), which gets the samples of the other rows on its standard input, and may open no table. Rows are priced
before, without their measurements.

The last lines hold the targets against the figures; it exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from armillary.planning.published.fitting import Fit, Sample, fit

if TYPE_CHECKING:
    from armillary.planning.published.training_row import TrainingRow

TARGETS = {
    "model": {"mean": 0.065, "median": 0.04, "moe": 0.12},
    "source": {"mean": 0.085, "moe": 0.15},
}
INSIDE = (0.85, 0.95)
"""share of rows that the 90 % intervals may contain"""
MEASURED = ("measured_tflops_per_gpu", "measured_tokens_per_s_per_gpu", "measured_mfu_pct", "measured_step_s")


# --- one fold, in its own process


def refuse_tables(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: a fit opens no table."""
    if event == "open" and str(arguments[0]).endswith(".csv"):
        raise PermissionError(f"a fit may not open {arguments[0]}")


def fit_from_stdin() -> int:
    sys.addaudithook(refuse_tables)
    samples = [Sample(**table | {"slopes": tuple(table["slopes"])}) for table in json.load(sys.stdin)]
    json.dump(asdict(fit(samples)), sys.stdout)
    return 0


def fit_apart(samples: Sequence[Sample]) -> Fit:
    """The fit of these samples, in a process that is given nothing else."""
    given = json.dumps([asdict(sample) for sample in samples])
    done = subprocess.run([sys.executable, __file__, "--fit"], input=given, capture_output=True, text=True, check=True)
    return Fit(**json.loads(done.stdout))


# --- rows


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A measured row, ready to be predicted with some factors."""

    sample: Sample
    kind: str
    row: TrainingRow

    def seconds(self, numbers: Mapping[str, float]) -> float:
        """Seconds per step with these factors."""
        from armillary.planning.training.step_time import step_time

        case = self.row.case
        case = replace(case, software=case.software.with_numbers(numbers))
        return float(step_time(case, self.row.layouts).total[0])


def read_rows(path: Path) -> list[Judged]:
    """The newest, complete rows; each is priced without its measurement."""
    from armillary.planning.published.row_samples import price
    from armillary.planning.published.table import matches, read_table
    from armillary.planning.published.training_row import measurement
    from armillary.planning.published.training_table import ready

    found = []
    for row in read_table(path):
        if not (matches(row, "complete") and matches(row, "newest") and measurement(row)):
            continue
        blank = dict(row) | {name: "1" for name in MEASURED if (row.get(name) or "").strip()}
        priced = price(ready(blank, fitted=False))
        sample = priced.sample(row)
        assert sample is not None
        found.append(Judged(sample=sample, kind=row.get("kind") or "dense", row=priced.row))
    return found


# --- folds


def folds(rows: Sequence[Judged], by: str) -> Iterator[tuple[list[Judged], list[Judged]]]:
    """(rows of the fit, rows to judge): without one model of a source, or without a source."""

    def key(row: Judged) -> tuple[str, ...]:
        return (row.sample.framework, row.sample.model) if by == "model" else (row.sample.framework,)

    for left_out in sorted({key(row) for row in rows}):
        yield [row for row in rows if key(row) != left_out], [row for row in rows if key(row) == left_out]


def judge(rows: Sequence[Judged], by: str) -> list[tuple[Judged, float, bool]]:
    """(row, error of its speed, whether it lies in its interval) for every row, when it was left out."""
    from armillary.planning.training.uncertainty import interval

    found = []
    for seen, unseen in folds(rows, by):
        fitted = fit_apart([row.sample for row in seen])
        for row in unseen:
            name = row.sample.framework
            seconds = row.seconds(fitted.numbers(name))
            within = interval(seconds, row.sample.spread, fitted.width(name))
            found.append((row, row.sample.measured_s / seconds - 1, within.contains(row.sample.measured_s)))
    return found


# --- report


def figures(judged: Sequence[tuple[Judged, float, bool]]) -> dict[str, float]:
    errors = [error for _, error, _ in judged]
    experts = [abs(error) for row, error, _ in judged if row.kind == "moe"]
    return {
        "rows": len(errors),
        "mean": mean(map(abs, errors)),
        "median": median(map(abs, errors)),
        "bias": mean(errors),
        "moe": mean(experts) if experts else 0.0,
        "inside": mean(inside for _, _, inside in judged),
    }


def report(path: Path) -> int:
    rows = read_rows(path)
    missed = []
    for by, targets in TARGETS.items():
        judged = judge(rows, by)
        print(f"\nleft out: one {by} at a time\n")
        print("| source | rows | mean | median | bias | experts | inside 90 % |\n|---|---:|---:|---:|---:|---:|---:|")
        for name in (*sorted({row.sample.framework for row in rows}), "all"):
            part = [one for one in judged if name in ("all", one[0].sample.framework)]
            found = figures(part)
            cells = [f"{found[key] * 100:.1f} %" for key in ("mean", "median", "bias", "moe", "inside")]
            print(f"| {name} | {len(part)} | {' | '.join(cells)} |")
        found = figures(judged)
        missed += [f"{by} {key} {found[key]:.3f} > {most}" for key, most in targets.items() if found[key] > most]
        if not INSIDE[0] <= found["inside"] <= INSIDE[1]:
            missed.append(f"{by}: {found['inside']:.1%} inside the 90 % intervals")
    print("\n" + (f"missed: {'; '.join(missed)}" if missed else "all targets hold"))
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", help="published_training.csv")
    parser.add_argument("--fit", action="store_true", help="fit the samples on standard input")
    options = parser.parse_args()
    sys.exit(fit_from_stdin() if options.fit else report(options.table))
