"""`plan table`: predictions beside the measurements of a CSV, and how far off they are."""

import csv
from pathlib import Path
from typing import Any

from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.planning.published.fitting import NAMES, Fit, fit
from armillary.planning.published.row_case import is_fitted_on
from armillary.planning.published.row_samples import price
from armillary.planning.published.table import TableEvaluation, matches, read_table
from armillary.planning.published.training_row import measurement
from armillary.planning.published.training_table import ready

SHOWN = 30
_FIGURES = {
    "tokens_per_s_per_gpu": "tok/s/GPU",
    "step_s": "s per step",
    "tflops_per_gpu": "TFLOP/s",
    "mfu_pct": "MFU, %",
    "tokens_out_per_s": "tok/s out",
    "ttft_s": "TTFT, s",
    "itl_s": "ITL, s",
}
_COLUMNS = ("predicted", "error", "physics_only", "physics_error", "memory_predicted_bytes", "memory_error", "reason")


def say_table(out: Output, evaluation: TableEvaluation) -> None:
    """The worst rows, the errors by framework and kind, and what could not be predicted."""
    summary = evaluation.summary
    known = sorted((row for row in evaluation.rows if row["error"] is not None), key=lambda row: -abs(row["error"]))
    if known:
        out.table(
            f"worst of {len(known)} rows",
            ["id", "framework", "model", "gpu", "figure", "measured", "predicted", "error", "physics"],
            [_cells(row) for row in known[: SHOWN // 3]],
        )
    total = summary | {key: summary[key]["mape"] for key in ("held_out", "physics_only")}
    by_kind = {f"({kind})": part for kind, part in summary["by_kind"].items()}
    cells = [
        [
            name,
            part["rows"],
            _share(part["mape"]),
            _share(part["median"]),
            _share(part["bias"]),
            _share(part["worst"]),
            _share(part.get("held_out")),
            _share(part.get("physics_only")),
        ]
        for name, part in [*summary["by_framework"].items(), *by_kind.items(), ("all", total)]
    ]
    out.table("errors", ["", "rows", "mean", "median", "bias", "worst", "not fitted", "physics only"], cells)
    _say_memory(out, summary["memory"])
    for missing in summary["not_predicted"][: SHOWN // 3]:
        out.say(f"not predicted: {missing['rows']} × {missing['framework']}: {missing['reason']}")
    if summary["predicted"] is not None:
        out.say(f"predicted {summary['predicted'] * 100:.1f} % of the rows that measured a speed")
    if summary.get("inside") is not None:
        out.say(f"{summary['inside'] * 100:.0f} % of the rows lie in their 90 % interval")


def _say_memory(out: Output, part: dict[str, Any]) -> None:
    if part.get("measured"):
        out.say(
            f"memory: {part['rows']} of {part['measured']} rows predicted, median error {_share(part['median'])}, "
            f"mean {_share(part['mape'])}"
        )
    if part.get("oom_rows"):
        out.say(f"out of memory: {part['oom_called']} of {part['oom_rows']} rows called so")


def _cells(row: dict[str, Any]) -> list[object]:
    return [
        row["config_id"],
        row["framework"],
        row["model"],
        row["gpu"],
        _FIGURES.get(row["figure"], row["figure"]),
        row["measured"],
        row["predicted"],
        _share(row["error"]),
        _share(row.get("physics_error")),
    ]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value * 100:+.1f} %" if value < 0 else f"{value * 100:.1f} %"


def write_beside(path: Path, evaluation: TableEvaluation, source: Path) -> None:
    """The table again with the predictions in further columns."""
    rows = {row["row"]: row for row in evaluation.rows}
    known = read_table(source)
    fields = [*known[0], *(f"armillary_{name}" for name in _COLUMNS)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        for i, row in enumerate(known, start=1):
            predicted = rows.get(i, {})
            writer.writerow({**row, **{f"armillary_{name}": predicted.get(name) for name in _COLUMNS}})


# --- fitting


def fit_frameworks(source: Path) -> Fit:
    """The numbers of frameworks.toml again, fitted on the even half of the newest, complete rows."""
    rows = [row for row in read_table(source) if matches(row, "complete") and matches(row, "newest")]
    half = [row for row in rows if is_fitted_on(row.get("config_id") or "1") and measurement(row)]
    samples = [price(ready(row, fitted=False)).sample(row) for row in half]
    known = [sample for sample in samples if sample is not None]
    if not known:
        raise BadInput(f"{source} has no measured training row with an even config_id; nothing to fit")
    return fit(known)


def say_fits(out: Output, fitted: Fit) -> None:
    numbers = {**fitted.frameworks, "common": fitted.common}
    cells = [[name, *(f"{values[key]:g}" for key in NAMES)] for name, values in numbers.items()]
    out.table("fitted on even config_ids", ["framework", *NAMES], cells)
    out.say(f"widths of intervals: known {fitted.known_width:g}, unknown {fitted.unknown_width:g}")
    out.result(fitted, quiet=[f"{name} {dict(values)}" for name, values in numbers.items()])
