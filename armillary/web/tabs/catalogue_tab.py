"""The tab Catalogue: models and devices side by side, with their rooflines in one chart."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from statistics import median

from armillary.errors import ArmillaryError
from armillary.report.page import section, table
from armillary.report.rooflines import DevicePeaks, rooflines
from armillary.spec import catalogue
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.arithmetic.params import kv_bytes_per_token, parameters
from armillary.spec.catalogue import ModelEntry
from armillary.spec.hardware import Chip
from armillary.store.home import Home
from armillary.units import bandwidth_text, bytes_text, count_text, dollars_text, flops_per_s_text, flops_text
from armillary.web.form import Field, Query, View, value_of

MOST = 6
"""things side by side"""
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
MODELS = Field(
    name="models", label="Models, separated by commas", default="llama-3-8b, qwen3-8b, mixtral-8x7b", wide=True
)
CHIPS = Field(
    name="chips", label="Chips, separated by commas", default="a100-80gb-sxm, h100-sxm, h200, b200, mi300x", wide=True
)
DTYPE = Field(name="dtype", label="Roofline of", default="bf16", options=("bf16", "fp16", "fp8", "fp32"))


def fields(query: Query, home: Home) -> list[Field]:
    return [MODELS, CHIPS, DTYPE]


def view(query: Query, home: Home) -> View:
    errors: dict[str, str] = {}
    entries = _named(query, MODELS, catalogue.model, errors)
    chips = _named(query, CHIPS, catalogue.chip, errors)
    if errors:
        return View(errors=errors)
    parts = [
        section("Models", _models(entries)),
        section("Chips (dense peaks)", _chips(chips)),
        section("Rooflines", _roofs(chips, value_of(query, DTYPE))),
        section("All of the catalogue", _all()),
    ]
    return View(html="".join(parts))


def _named(query: Query, wanted: Field, find: Callable[[str], object], errors: dict[str, str]) -> list[object]:
    names = [name.strip() for name in value_of(query, wanted).split(",") if name.strip()]
    if len(names) > MOST:
        errors[wanted.name] = f"{len(names)} are too many side by side; name at most {MOST}"
        return []
    try:
        return [find(name) for name in names]
    except ArmillaryError as error:
        errors[wanted.name] = str(error)
        return []


def _models(entries: list[object]) -> str:
    models = [entry for entry in entries if isinstance(entry, ModelEntry)]
    figures: list[tuple[str, Callable[[ModelEntry], str]]] = [
        ("parameters", lambda each: count_text(parameters(each.config).total)),
        ("used per token", lambda each: count_text(parameters(each.config).active)),
        ("layers", lambda each: str(len(each.config.layers))),
        ("hidden", lambda each: f"{each.config.hidden:,}"),
        ("heads / KV heads", lambda each: f"{each.config.heads} / {each.config.kv_heads}"),
        ("MLP", lambda each: f"{each.config.ffn:,}" if each.config.ffn else "–"),
        ("experts", lambda each: _experts(each)),
        ("vocabulary", lambda each: f"{each.config.vocab:,}"),
        ("context", lambda each: f"{each.config.context:,}"),
        ("weights, bf16", lambda each: bytes_text(2 * parameters(each.config).total)),
        ("KV cache per token, bf16", lambda each: bytes_text(kv_bytes_per_token(each.config))),
        ("training FLOPs per token", lambda each: f"{flops_text(model_flops_per_token(each.config, 4096))} at 4,096"),
        ("source", lambda each: each.source),
    ]
    heads = ["figure", *(each.config.name for each in models)]
    return table(heads, [[name, *(text(each) for each in models)] for name, text in figures], wide=True)


def _experts(entry: ModelEntry) -> str:
    moe = entry.config.moe
    return f"{moe.top_k} of {moe.num_experts}, MLP {moe.ffn:,}" if moe else "–"


def _chips(entries: list[object]) -> str:
    chips = [chip for chip in entries if isinstance(chip, Chip)]
    rows: list[list[str]] = [
        ["memory", *(_text(bytes_text, chip.memory_bytes) for chip in chips)],
        ["memory bandwidth", *(_text(bandwidth_text, chip.memory_bytes_per_s) for chip in chips)],
        *([dtype, *(_text(flops_per_s_text, chip.flops.get(dtype)) for chip in chips)] for dtype in DTYPES),
        ["bf16, with sparsity", *(_text(flops_per_s_text, chip.sparse_flops.get("bf16")) for chip in chips)],
        ["power", *(f"{chip.tdp_w:,.0f} W" if chip.tdp_w else "–" for chip in chips)],
        ["rent per hour, median", *(_rent(chip) for chip in chips)],
        ["year", *(str(chip.year or "–") for chip in chips)],
        ["source", *(chip.source_of("bf16_flops") or "–" for chip in chips)],
    ]
    known = [row for row in rows if any(cell != "–" for cell in row[1:])]
    return table(["figure", *(chip.title for chip in chips)], known, wide=True)


def _text(text: Callable[[float], str], value: float | None) -> str:
    return text(value) if value is not None else "–"


def _rent(chip: Chip) -> str:
    rents = [price.usd_per_hour for price in catalogue.prices(chip.name)]
    return dollars_text(median(rents)) if rents else "–"


def _roofs(entries: list[object], dtype: str) -> str:
    chips = [chip for chip in entries if isinstance(chip, Chip)]
    roofs = [
        DevicePeaks(name=chip.title, flops_per_s=peak, bytes_per_s=chip.memory_bytes_per_s)
        for chip in chips
        if (peak := chip.flops.get(dtype)) and chip.memory_bytes_per_s
    ]
    if not roofs:
        return f"<p>None of these chips has a known peak in {escape(dtype)}.</p>"
    return rooflines(roofs, label=f"Rooflines in {dtype}", y_text=flops_per_s_text)


def _all() -> str:
    models, chips = ", ".join(catalogue.models()), ", ".join(catalogue.chips())
    return f"<details><summary>Names</summary><p>{escape(models)}</p><p>{escape(chips)}</p></details>"
