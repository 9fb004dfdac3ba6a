"""The planner's errors on published training runs, as the tables of planning_accuracy.md.

    python benchmarks/planning_accuracy.py published_training.csv

It exits with 1 where the full table is predicted worse than planning_accuracy.md states.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from armillary.planning.published.table import evaluate_table


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f} %"


def row(name: str, part: dict[str, Any]) -> str:
    shown = [percent(part.get(key)) for key in ("mape", "median", "bias", "worst", "held_out", "physics_only")]
    return f"| {name} | {part['rows']} | " + " | ".join(shown) + " |"


def main(training: Path) -> int:
    found = evaluate_table(training, ["newest", "complete"]).summary
    print("| framework | rows | mean | median | bias | worst | rows not fitted | physics only |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, part in found["by_framework"].items():
        print(row(name, part))
    for name, part in found["by_kind"].items():
        print(row(f"all {name}", part))
    whole = found | {"held_out": found["held_out"]["mape"], "physics_only": found["physics_only"]["mape"]}
    print(row("all", whole))
    print(
        f"\npredicted {percent(found['predicted'])}; rows not fitted: median {percent(found['held_out']['median'])}; "
        f"physics only: median {percent(found['physics_only']['median'])}"
    )
    memory = evaluate_table(training).summary["memory"]
    print(f"\nmemory: {memory['by_framework']}; out of memory called {memory['oom_called']} of {memory['oom_rows']}")
    broken = [name for name, holds in bounds(found, memory).items() if not holds]
    print("\n" + (f"worse than stated: {', '.join(broken)}" if broken else "all stated bounds hold"))
    return 1 if broken else 0


def bounds(table: dict[str, Any], memory: dict[str, Any]) -> dict[str, bool]:
    """What planning_accuracy.md states of the full table -> whether it holds."""
    large = [part for part in table["by_framework"].values() if part["rows"] >= 20]
    litgpt = memory["by_framework"].get("litgpt", {"median": 1.0})
    return {
        "95 % of rows predicted": table["predicted"] >= 0.95,
        "mean error 10 %": table["mape"] <= 0.10 and table["held_out"]["mape"] <= 0.10,
        "median error 7 %": table["median"] <= 0.07,
        "15 % for each framework of 20 rows": all(part["mape"] <= 0.15 for part in large),
        "15 % with physics only": table["physics_only"]["mape"] <= 0.15,
        "fine-tuning memory: median 10 %": litgpt["median"] <= 0.10,
        "fine-tuning memory: every out-of-memory row called": memory["oom_called"] == memory["oom_rows"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="published_training.csv")
    sys.exit(main(parser.parse_args().table))
