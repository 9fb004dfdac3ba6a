"""Rotary parameters between a Hugging Face config.json (old and new spelling) and `Rope`.

Old files have `rope_theta` and `rope_scaling`; new ones one `rope_parameters` table, per layer type where
layers differ. We read both and write the old spelling, which every release of every reader understands.
"""

from collections.abc import Mapping
from typing import Any, get_args

from armillary.errors import BadModel
from armillary.spec.model import Rope, RopeScaling

_KNOWN: dict[str, RopeScaling] = {name: name for name in get_args(RopeScaling)}


def read_rope(raw: Mapping[str, Any], *, theta: float = 10_000.0, fraction: float | None = None) -> Rope:
    """`Rope` from a config's rope fields; `theta` and `fraction` are the family's defaults. A family that gives no
    fraction rotates full heads, whatever its file says, as transformers does."""
    table = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    local = None
    if "full_attention" in table:
        local = (table.get("sliding_attention") or {}).get("rope_theta")
        table = table["full_attention"]
    elif raw.get("rope_local_base_freq"):
        local = raw["rope_local_base_freq"]
    base = table.get("rope_theta") or raw.get("rope_theta") or raw.get("rotary_emb_base") or theta
    candidates = (table.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), raw.get("rotary_pct"), fraction)
    part = 1.0 if fraction is None else next(value for value in candidates if value is not None)
    scaling = table.get("rope_type") or table.get("type") or "none"
    if "short_factor" in table:
        scaling = "longrope"  # early Phi-3 files call it su or yarn
    scaling = "none" if scaling == "default" else scaling
    if scaling not in _KNOWN:
        raise BadModel(f"rope type '{scaling}' is not known; it can be one of {', '.join(_KNOWN)}")
    return Rope(
        theta=float(base),
        local_theta=float(local) if local is not None and local != base else None,
        fraction=float(part),
        scaling=_KNOWN[scaling],
        **_scaling_fields(scaling, table, raw),
    )


def _scaling_fields(scaling: str, table: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    if scaling == "none":
        return {}
    if scaling in ("linear", "dynamic"):
        return {"factor": float(table.get("factor") or 1.0)}
    context = raw.get("max_position_embeddings")
    original = table.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    factor = table.get("factor")
    if factor is None:
        factor = context / original if context and original else 1.0
    return {
        "factor": float(factor),
        "original_context": original or context,
        "low_freq_factor": float(table.get("low_freq_factor") or 1.0),
        "high_freq_factor": float(table.get("high_freq_factor") or 4.0),
        "beta_fast": float(table.get("beta_fast") or 32.0),
        "beta_slow": float(table.get("beta_slow") or 1.0),
        "mscale": table.get("mscale"),
        "mscale_all_dim": table.get("mscale_all_dim"),
        "truncate": table.get("truncate", True),
        "attention_factor": table.get("attention_factor"),
        "short_factors": tuple(map(float, table.get("short_factor") or ())),
        "long_factors": tuple(map(float, table.get("long_factor") or ())),
    }


def write_rope(rope: Rope) -> dict[str, Any]:
    """The rope fields of a config.json."""
    raw: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.fraction != 1.0:
        raw["partial_rotary_factor"] = rope.fraction
    if rope.scaling == "none":
        return raw | {"rope_scaling": None}
    table = {"rope_type": rope.scaling, "factor": rope.factor} | _WRITERS[rope.scaling](rope)
    return raw | {"rope_scaling": table}


def _write_llama3(rope: Rope) -> dict[str, Any]:
    return {
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def _write_yarn(rope: Rope) -> dict[str, Any]:
    known = {
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "attention_factor": rope.attention_factor,
    }
    table = {key: value for key, value in known.items() if value is not None}
    return table if rope.truncate else table | {"truncate": False}


def brief_longrope(rope: Rope) -> dict[str, Any]:
    """These three keys only, as Phi-3's own readers insist; the factor follows from the two contexts."""
    table: dict[str, Any] = {"type": "longrope"}
    table |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    return table if rope.attention_factor is None else table | {"attention_factor": rope.attention_factor}


_WRITERS: dict[str, Any] = {
    "linear": lambda rope: {},
    "dynamic": lambda rope: {},
    "llama3": _write_llama3,
    "yarn": _write_yarn,
    "longrope": lambda rope: brief_longrope(rope) | {"original_max_position_embeddings": rope.original_context},
}
