"""Inference engines: rates that all engines share, and at most two fitted parameters per engine.

Rates of the chip itself are in efficiency.toml; these are of serving: skinny GEMMs, reading a KV cache, small
all-reduces. All are in engines.toml, the fitted ones with their source, their date and the command that fits them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, unknown

MOST_PARAMETERS = 2
"""most parameters in which an engine may deviate from the physics"""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How an engine uses a chip; the last four are factors on the rates of expert GEMMs, of all GEMMs and of reads, and
    on the fixed overhead of kernels and all-reduces."""

    overlap: float
    """exponent p of the soft roofline (computeᵖ + readsᵖ)^(1/p) for a single wave of thread blocks: 1 none, ∞ full"""
    overlap_waves: float
    """added to the exponent for every wave"""
    grouped: float
    """rate of grouped expert GEMMs over that of a plain GEMM"""
    kv: float
    """rate of reading a long KV cache over that of reading weights"""
    kv_start_bytes: float
    """bytes of a KV head that could be read while its thread block starts"""
    launch_s: float
    """host time per launch where steps are not captured in a graph (prefill)"""
    allreduce_s: float
    """time of the smallest all-reduce, without the wire"""
    link: float
    """share of a link's bandwidth that an all-reduce in an engine step reaches"""
    dequantise_8: float
    """time to read 8-bit weights for 16-bit compute, over the time of their bytes"""
    dequantise_4: float
    """the same for 4-bit weights"""
    step_s: float
    """host time between two steps that nothing hides"""
    row_s: float
    """the same per running request: scheduling, sampling's book-keeping, detokenising and streaming one by one"""
    kv_reread: float = 0.0
    """share of the KV cache that is read again per further query head of a group; 0: the group shares one read"""
    expert_rate: float = 1.0
    compute_rate: float = 1.0
    memory_rate: float = 1.0
    fixed_time: float = 1.0
    one_row: float = 1.0
    """kernels of a step that generates a single token over its operations"""
    decode_attention: float = 1.0
    """time of a decode attention call of more rows beside its reads, in kernels: it is split and summed up"""
    prompt_attention: float = 1.0
    """rate of prompts' attention over a paged KV cache over that over contiguous keys"""

    def __post_init__(self) -> None:
        for rate in fields(self):
            value, zero = getattr(self, rate.name), rate.name.endswith(("_s", "_bytes", "_reread"))
            if not (value > 0 or (zero and value == 0)):
                raise BadInput(f"{rate.name}={value} must be above 0; see planning/serving/engines.toml")

    def dequantise(self, weights: str, compute: str) -> float:
        """Factor on the time to read weights that are stored in fewer bits than they are computed in."""
        if weights == compute:
            return 1.0
        eight, four = self.dequantise_8, self.dequantise_4
        return {"int8": eight, "fp8": eight, "int4": four, "fp4": four}.get(weights, 1.0)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An inference engine's declared deviations from the physics."""

    name: str
    match: tuple[str, ...]
    """prefixes of its name in tables, lower case"""
    parameters: Mapping[str, float]
    source: str
    date: str
    command: str
    facts: Mapping[str, float] = field(default_factory=dict)
    """rates that were counted rather than fitted"""

    def __post_init__(self) -> None:
        if len(self.parameters) > MOST_PARAMETERS:
            raise BadInput(f"engine {self.name} declares {len(self.parameters)} parameters; keep {MOST_PARAMETERS}")
        for name in (*self.parameters, *self.facts):
            if name not in Rates.__dataclass_fields__:
                raise unknown("rate", name, Rates.__dataclass_fields__, where="planning/serving/engines.toml")

    def rates(self) -> Rates:
        return replace(physics(), **dict(self.parameters), **dict(self.facts))


@cache
def _toml() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "engines.toml").read_text(encoding="utf-8"))


@cache
def physics() -> Rates:
    """The rates of every engine, without fitted parameters."""
    return Rates(**{key: row["value"] for key, row in _toml()["physics"].items()})


@cache
def engines() -> dict[str, Engine]:
    """Every engine that declares parameters, by name."""
    return {
        name: Engine(name=name, **table | {"match": tuple(table["match"])}) for name, table in _toml()["engine"].items()
    }


def engine_for(text: str) -> Engine | None:
    """The engine that `text` names ('TensorRT-LLM 0.9'), or None: then the physics alone holds."""
    wanted = text.strip().lower()
    return next((engine for engine in engines().values() if wanted.startswith(engine.match)), None)


def rates_for(text: str) -> Rates:
    """The rates of the engine that `text` names, else the physics."""
    engine = engine_for(text)
    return engine.rates() if engine else physics()


def own_rates() -> Rates:
    """The rates of this package's engine."""
    return rates_for("armillary")
