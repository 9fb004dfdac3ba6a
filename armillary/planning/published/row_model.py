"""The model of a table row: the catalogue's where name and shape agree, else one built from the row's dimensions.

What a row leaves open (gated or plain MLP, tied or not) is chosen so that the parameters are nearest to its params_b.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from math import inf, nan

from armillary.errors import BadInput
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import LayerKind, ModelConfig, MoE, refuse_too_deep

Row = Mapping[str, str]
_LONGEST = 2**40


def number(row: Row, name: str) -> float | None:
    """A cell as a number, None where it is empty; negative and infinite values are refused."""
    text = (row.get(name) or "").strip().replace(",", "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = nan
    if value is not None and not 0 <= value < inf:
        raise BadInput(f"{name}={text!r} is not a number from 0 up; correct the cell")
    return value


def integer(row: Row, name: str) -> int | None:
    """A cell as a count, None where it is empty or 0."""
    value = number(row, name)
    if value is not None and value != int(value):
        raise BadInput(f"{name}={value:g} is not a whole number; correct the cell")
    return int(value) if value else None


def model_of(row: Row) -> ModelConfig:
    """The row's model."""
    if (row.get("kind") or "") == "hybrid":
        raise BadInput("a hybrid model (state-space or other layers) is not a plain transformer")
    sizes = {name: number(row, name) for name in ("layers", "hidden", "heads")}
    known = _in_catalogue(row.get("model") or "", loose=not all(sizes.values()))
    if known is not None and all(size in (None, getattr(known, _FIELDS[name])) for name, size in sizes.items()):
        vocab = number(row, "vocab")
        return replace(known, context=_LONGEST, vocab=int(vocab) if vocab else known.vocab)
    if not all(sizes.values()):
        raise BadInput("neither dimensions nor a model of the catalogue")
    return _nearest_in_size(row)


_FIELDS = {"layers": "num_layers", "hidden": "hidden", "heads": "heads"}


def second_token_layers(row: Row) -> int:
    """Layers that predict a second token (DeepSeek-V3 trains with one unless the name says w/o MTP)."""
    name = (row.get("model") or "").lower()
    return int("deepseek" in name and "v3" in name.replace(" ", "") and "w/o mtp" not in name)


# --- by name


def _in_catalogue(name: str, *, loose: bool) -> ModelConfig | None:
    """By letters and digits; `loose` also by a common beginning or a similar spelling."""
    names, wanted = _names(), _plain(name)
    if wanted in names or not wanted:
        return catalogue.model(names[wanted]).config if wanted else None
    if not loose:
        return None
    prefixes = [known for known in names if known.startswith(wanted) or wanted.startswith(known)]
    similar = get_close_matches(wanted, names, n=1, cutoff=0.9)
    best = min(prefixes, key=lambda known: abs(len(known) - len(wanted)), default=None) or next(iter(similar), None)
    return catalogue.model(names[best]).config if best else None


@cache
def _names() -> dict[str, str]:
    entries = catalogue.models()
    return {_plain(alias): name for name, entry in entries.items() for alias in (name, *entry.aliases)}


def _plain(name: str) -> str:
    """'LLAMA3.1_405B (SFT)' -> 'llama3.1405b'."""
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)|-instruct", "", name.lower()))


# --- by dimensions


def _nearest_in_size(row: Row) -> ModelConfig:
    """The variant (gated or not, tied or not) whose parameters are nearest to params_b."""
    wanted = number(row, "params_b")
    variants = [_build(row, gated=gated, tied=tied) for gated in (True, False) for tied in (False, True)]
    if wanted is None:
        plain = (number(row, "ffn") or 0) == 4 * (number(row, "hidden") or 0)
        return variants[2] if plain else variants[0]
    return min(variants, key=lambda model: abs(parameters(model).total - wanted * 1e9))


def _build(row: Row, *, gated: bool, tied: bool) -> ModelConfig:
    layers, hidden, heads = (integer(row, name) or 0 for name in ("layers", "hidden", "heads"))
    refuse_too_deep(layers)
    experts = int(number(row, "experts") or 0)
    ffn = int(number(row, "ffn") or 4 * hidden)
    moe = None
    if experts:
        moe = MoE(num_experts=experts, top_k=int(number(row, "top_k") or 1), ffn=int(number(row, "moe_ffn") or ffn))
    kind = LayerKind(mlp="moe" if experts else "dense")
    return ModelConfig(
        name=row.get("model") or "row",
        hidden=hidden,
        heads=heads,
        kv_heads=int(number(row, "kv_heads") or heads),
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=int(number(row, "vocab") or 50_304),
        context=_LONGEST,
        layers=(kind,) * layers,
        tied=tied,
        gated=gated,
        moe=moe,
        norm="rms" if gated else "layer",
    )
