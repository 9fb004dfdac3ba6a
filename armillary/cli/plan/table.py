"""`plan table`: predictions beside the measurements of a CSV, and how far off they are."""

import csv
from pathlib import Path
from typing import Any

from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.planning.device_model.frameworks import MOST_PARAMETERS, declared
from armillary.planning.published.fitting import Fit, fit
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


def fit_frameworks(source: Path) -> dict[str, Fit]:
    """The declared numbers of every framework again, fitted on the even half of its newest, complete rows."""
    rows = [row for row in read_table(source) if matches(row, "complete") and matches(row, "newest")]
    fits = {}
    for name, software in declared().items():
        own = [row for row in rows if (row.get("framework") or "").split(" ")[0] == name and measurement(row)]
        if own and software.fitted:
            assert len(software.fitted) <= MOST_PARAMETERS, "frameworks.toml was checked when read"
            fits[name] = fit([ready(row, fitted=False) for row in own], list(software.fitted))
    if not fits:
        raise BadInput(f"{source} has no row of {', '.join(declared())}; nothing to fit")
    return fits


def say_fits(out: Output, fits: dict[str, Fit]) -> None:
    cells = [
        [
            name,
            ", ".join(f"{key} = {value:g}" for key, value in fitted.numbers.items()),
            _share(fitted.fitted_error),
            _share(fitted.other_error),
        ]
        for name, fitted in fits.items()
    ]
    out.table("fitted on even config_ids", ["framework", "numbers", "mean error there", "on the others"], cells)
    out.result(fits, quiet=[f"{name} {dict(fitted.numbers)}" for name, fitted in fits.items()])
