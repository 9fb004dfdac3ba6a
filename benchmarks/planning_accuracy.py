"""The planner's errors on published training runs, as the tables of planning_accuracy.md.

python benchmarks/planning_accuracy.py published_training.csv
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from armillary.planning.published.table import judge


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f} %"


def row(name: str, part: dict[str, Any]) -> str:
    shown = [percent(part.get(key)) for key in ("mape", "median", "bias", "worst", "held_out", "physics_only")]
    return f"| {name} | {part['rows']} | " + " | ".join(shown) + " |"


def main(training: Path) -> None:
    found = judge(training, ["newest", "complete"]).summary
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
    memory = judge(training).summary["memory"]
    print(f"\nmemory: {memory['by_framework']}; out of memory called {memory['oom_called']} of {memory['oom_rows']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
