"""The matrix: every strategy on some ranks, with accumulation, recompute and both formats, compared with one process.

`measure` runs on every rank of a process group; the main rank runs the same steps alone and compares. A page of docs
shows the matrix, each row from its last run: a part of the matrix can be run again by itself.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.parity.case import (
    Case,
    Outcome,
    error,
    gpt_oss,
    latent,
    mixture,
    qwen3_next,
    simplicial,
    steps,
    tiny,
)
from armillary.training.parity.strategies import ALL, EXPERTS, GPT_OSS, LATENT, QWEN3_NEXT, SIMPLICIAL, layout_of

STEPS = 20
FORMATS = ("fp32", "fp64")
FIGURES = ("loss", "norm", "weights")
BARS = {
    "fp32": {"loss": 1e-6, "norm": 1e-5, "weights": 1e-5},
    "fp64": {"loss": 1e-10, "norm": 1e-10, "weights": 1e-10},
}
"""the largest relative difference that holds"""
VARIANTS = {
    "fp32": ((1, "none", 1), (2, "full", 1), (2, "selective", 1), (1, "full", 2)),
    "fp64": ((1, "none", 1), (2, "full", 1), (2, "selective", 2)),
}
"""micro-batches, recompute, one layer in …"""
GPT_OSS_EPS = 1e-6
"""AdamW's eps for that model: one weight of an expert has a gradient of 4e-9 in the first step, and with 1e-8 rounding
decides 0.3 % of its update (`Case`); gradients are 3e-4 at large"""


@dataclass(frozen=True)
class Row:
    """A strategy on some ranks: the worst over all variants, by format and figure."""

    strategy: str
    world: int
    variants: int
    errors: dict[str, dict[str, float]]

    @property
    def over(self) -> list[str]:
        """What is beyond its bar: 'weights fp32 2.1e-05 > 1e-05'."""
        return [
            f"{name} {dtype} {value:.1e} > {BARS[dtype][name]:g}"
            for dtype, errors in self.errors.items()
            for name, value in errors.items()
            if not value <= BARS[dtype][name]
        ]


def cases_of(strategy: str, world: int, formats: Sequence[str] = FORMATS) -> list[Case]:
    """The variants of a strategy on so many ranks; none where it has no use for them."""

    def layout(recompute: str, interval: int) -> Layout | None:
        return layout_of(strategy, world, recompute=recompute, recompute_every=interval)

    models = (
        (LATENT, latent),
        (GPT_OSS, gpt_oss),
        (QWEN3_NEXT, qwen3_next),
        (SIMPLICIAL, simplicial),
        (EXPERTS, mixture),
    )
    cases = _variants(layout, formats, next((model for group, model in models if strategy in group), tiny))
    return [replace(case, eps=GPT_OSS_EPS) for case in cases] if strategy in GPT_OSS else cases


def cases_of_layout(given: Layout, formats: Sequence[str] = FORMATS, *, experts: bool) -> list[Case]:
    """The variants of a user's layout, on a tiny model with experts or without."""

    def layout(recompute: str, interval: int) -> Layout:
        plain = replace(given, precision="fp32", micro_batch=1)
        return replace(plain, recompute=recompute, recompute_every=interval)  # type: ignore[arg-type]

    return _variants(layout, formats, mixture if experts else tiny)


def _variants(
    layout_for: Callable[[str, int], Layout | None], formats: Sequence[str], model: Callable[[], ModelConfig]
) -> list[Case]:
    variants = [(dtype, *variant) for dtype in formats for variant in VARIANTS[dtype]]
    layouts = [layout_for(recompute, interval) for _, _, recompute, interval in variants]
    return [
        Case(
            layout=layout,
            config=_config(layout, model()),
            dtype=dtype,
            steps=STEPS,
            accumulate=max(accumulate, 2 * layout.pp if layout.pp > 1 else 1),
            chunk=20 * (accumulate - 1),
        )
        for (dtype, accumulate, recompute, _), layout in zip(variants, layouts, strict=True)
        if layout is not None and not (recompute == "selective" and refuses_selective(layout))
    ]


def refuses_selective(layout: Layout) -> bool:
    """Selective recompute works neither with split backward passes nor with offloaded activations."""
    return (layout.pp > 1 and layout.schedule == "zero_bubble") or layout.offload in ("activations", "both")


def _config(layout: Layout, config: ModelConfig) -> ModelConfig:
    """With as many layers as there are chunks, where those of the tiny models are too few."""
    more = layout.pp * layout.interleave - config.num_layers - 2
    return replace(config, layers=(*config.layers, *[LayerKind()] * more)) if more > 0 else config


def measure(strategy: str, world: int, cases: Sequence[Case]) -> Row:
    """Run every case on the ranks there are, and on the main one alone; what others give is not worth sending."""
    worst: dict[str, dict[str, float]] = {}
    for case in cases:
        outcome = steps(case)
        if dist.get_rank() == 0:
            errors = worst.setdefault(case.dtype, {})
            for name, value in error(outcome, alone(case.alone())).items():
                errors[name] = max(value, errors.get(name, 0.0))
    return Row(strategy, world, len(cases), worst)


@cache
def alone(case: Case) -> Outcome:
    """The same steps in one process."""
    return steps(case)


# --- the page

_NONE = "–"
_WHERE = "gloo, CPU"
_COLUMNS = [(dtype, name) for dtype in FORMATS for name in FIGURES]


def table(rows: Sequence[Row]) -> str:
    """Markdown; every row says that it ran on gloo, because nothing here runs elsewhere."""
    lines = [f"| {' | '.join([*columns(), 'ran on'])} |", "|---|--:|--:|" + "--:|" * len(_COLUMNS) + "---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join([*cells(row), _WHERE])} |" for row in rows)]) + "\n"


def cells(row: Row, formats: Sequence[str] = FORMATS, figures: Sequence[str] = FIGURES) -> list[str]:
    """The row as people read it."""
    values = [
        f"{row.errors[dtype][name]:.1e}" if dtype in row.errors else _NONE
        for dtype, name in _COLUMNS
        if dtype in formats and name in figures
    ]
    return [row.strategy, str(row.world), str(row.variants), *values, "no" if row.over else "yes"]


def columns(formats: Sequence[str] = FORMATS, figures: Sequence[str] = FIGURES) -> list[str]:
    shown = [f"{name} {dtype}" for dtype, name in _COLUMNS if dtype in formats and name in figures]
    return ["strategy", "ranks", "runs", *shown, "holds"]


def rows_of(text: str) -> list[Row]:
    """The rows of a page; one without its columns is left out."""
    parsed = (_parsed(line) for line in text.splitlines() if line.startswith("| ") and _WHERE in line)
    return [row for row in parsed if row is not None]


def _parsed(line: str) -> Row | None:
    parts = [part.strip() for part in line.strip().strip("|").split("|")]
    values = dict(zip(_COLUMNS, parts[3:], strict=False))
    if len(values) < len(_COLUMNS):
        return None
    errors = {
        dtype: {name: float(values[dtype, name]) for name in FIGURES}
        for dtype in FORMATS
        if values[dtype, FIGURES[0]] != _NONE
    }
    return Row(parts[0], int(parts[1]), int(parts[2]), errors)


def with_rows(text: str, new: Sequence[Row]) -> str:
    """The page with these rows in their places, or in those of earlier runs; rows of strategies that are gone go."""
    rows = {(row.strategy, row.world): row for row in (*rows_of(text), *new)}
    names = [*ALL, *(row.strategy for row in new if row.strategy not in ALL)]
    worlds = sorted({world for _, world in rows})
    return page([rows[name, world] for world in worlds for name in dict.fromkeys(names) if (name, world) in rows])


def page(rows: Sequence[Row]) -> str:
    bars = "; ".join(
        f"{dtype} " + ", ".join(f"{name} {bar:g}" for name, bar in BARS[dtype].items()) for dtype in FORMATS
    )
    most = sum(map(len, VARIANTS.values()))
    older = "Rows of 8 runs are older: a rate of 1e-2. " if any(row.variants > most for row in rows) else ""
    return (
        "# Agreement of every strategy with one process\n\n"
        "Written by `armillary parity` and by `pytest -m slow tests/parallel/test_matrix.py`, last on "
        f"{datetime.date.today()}, torch {torch.__version__}. Largest relative difference from one process over "
        f"{STEPS} AdamW steps of a tiny model (vocabulary 37, which no number of ranks divides; with experts: 8, two a "
        "token and a shared one, balance loss, z-loss and selection bias; latent: the same DeepSeek-style, with latent "
        "attention and experts in groups; gpt-oss: sinks, a sliding layer, biases, experts in every layer; qwen3-next: "
        "a gated delta-net layer and one with gated attention), learning "
        f"rate 3e-3 (AdamW's eps 1e-8, for gpt-oss {GPT_OSS_EPS:g}), gradients clipped to a norm of 1, over the "
        "variants without and with accumulation, full, selective and every-second-layer recompute. Bars: "
        f"{bars}. {older}{len({row.strategy for row in rows})} of {len(ALL)} strategies are below.\n\n" + table(rows)
    )
