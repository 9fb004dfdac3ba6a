"""What inference engines do beside the physics: rates that all share, and at most three fitted numbers an engine.

Rates of the chip itself are in efficiency.toml; these are of serving: skinny products, reading a KV cache, small
all-reduces. All are in engines.toml, the fitted ones with their source, their date and the command that fits them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, unknown

MOST_PARAMETERS = 3
"""an engine may deviate from the physics in no more than this"""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How an engine uses a chip."""

    overlap: float
    """exponent p of the soft roofline (computeᵖ + readsᵖ)^(1/p) for a single wave of thread blocks: 1 none, ∞ full"""
    overlap_waves: float
    """added to it for every wave"""
    grouped: float
    """rate of the experts' products over that of a plain product"""
    kv: float
    """rate at which a long KV cache is read, over that of weights"""
    kv_start_bytes: float
    """bytes of a head's keys and values that could be read while the thread block for them starts"""
    launch_s: float
    """host time of a launch where steps are not captured in a graph (prefill)"""
    allreduce_s: float
    """time of the smallest all-reduce, wires apart"""
    link: float
    """share of a link's bandwidth that an all-reduce in a decode or prefill step reaches"""
    dequantise_8: float
    """time to read 8-bit weights that are computed on in 16 bits, over the time of their bytes"""
    dequantise_4: float
    """the same for 4-bit weights"""
    step_s: float
    """host time between two steps that nothing hides"""
    kv_reread: float = 0.0
    """share of the KV cache read again for every further query head of a group; 0: the group shares one read"""
    experts_in_16_bits: float = 0.0
    """1: the experts' products run in 16 bits whatever the weights' format"""
    expert_rate: float = 1.0
    """multiplies the rate of the experts' products"""
    compute_rate: float = 1.0
    """multiplies the rate of matrix products"""
    memory_rate: float = 1.0
    """multiplies the rate of reads"""
    fixed_time: float = 1.0
    """multiplies what kernels and all-reduces cost beside their work"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, zero = getattr(self, field.name), field.name.endswith(("_s", "_bytes", "_reread", "_bits"))
            if not (value > 0 or (zero and value == 0)):
                raise BadInput(f"{field.name}={value} must be above 0; see planning/serving/engines.toml")

    def dequantise(self, weights: str, compute: str) -> float:
        """Factor on the time to read weights stored narrower than they are computed on."""
        if weights == compute:
            return 1.0
        eight, four = self.dequantise_8, self.dequantise_4
        return {"int8": eight, "fp8": eight, "int4": four, "fp4": four}.get(weights, 1.0)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An inference engine's declared deviations from the physics."""

    name: str
    """what it is called"""
    match: tuple[str, ...]
    """how its name starts in tables, lower case"""
    parameters: Mapping[str, float]
    """field of Rates -> value, at most three"""
    source: str
    """what they were fitted to"""
    date: str
    """when"""
    command: str
    """how to fit them again"""

    def __post_init__(self) -> None:
        if len(self.parameters) > MOST_PARAMETERS:
            raise BadInput(f"engine {self.name} declares {len(self.parameters)} parameters; keep {MOST_PARAMETERS}")
        for name in self.parameters:
            if name not in Rates.__dataclass_fields__:
                raise unknown("rate", name, Rates.__dataclass_fields__, where="planning/serving/engines.toml")

    def rates(self) -> Rates:
        return replace(physics(), **dict(self.parameters))


@cache
def _toml() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "engines.toml").read_text(encoding="utf-8"))


@cache
def physics() -> Rates:
    """The rates that hold for every engine: no fitted number of any engine in them."""
    return Rates(**{key: row["value"] for key, row in _toml()["physics"].items()})


@cache
def engines() -> dict[str, Engine]:
    """Every engine that declares parameters, by name."""
    return {
        name: Engine(name=name, **table | {"match": tuple(table["match"])}) for name, table in _toml()["engine"].items()
    }


def engine_for(text: str) -> Engine | None:
    """The engine a table means by `text` ('TensorRT-LLM 0.9'), or None: then the physics alone holds."""
    wanted = text.strip().lower()
    return next((engine for engine in engines().values() if wanted.startswith(engine.match)), None)


def rates_for(text: str) -> Rates:
    """The rates of the engine that `text` names, else the physics."""
    engine = engine_for(text)
    return engine.rates() if engine else physics()
