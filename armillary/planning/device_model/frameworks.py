"""Software: what a framework does beside the physics, as settings that are facts and at most two fitted numbers.

Physics alone has no fitted number. The declared ones are in frameworks.toml with their date and how they are fitted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from armillary.errors import BadInput
from armillary.spec.model import ModelConfig

PARAMETERS = ("gemm", "attention", "memory", "communication", "host", "experts")
"""times that a framework's fitted numbers may multiply"""
MOST_PARAMETERS = 2


@dataclass(frozen=True, kw_only=True)
class Software:
    """A framework as the planner sees it."""

    name: str = "physics"
    """what it is called"""
    gemm: float = 1.0
    """time of matrix products, times this"""
    attention: float = 1.0
    """time of attention, times this"""
    memory: float = 1.0
    """time of passes over memory, times this (unfused operations)"""
    communication: float = 1.0
    """time of collectives, times this"""
    host: float = 1.0
    """time of launches on the host, times this"""
    experts: float = 1.0
    """time of routed products and the passes around them, times this, where no fused kernel does them"""
    attention_kernel: str = "attention"
    """fused attention: 'attention', the chip generation's own, or 'flash_2'"""
    flat_gathers: bool = False
    """sharded weights reach every rank over its own network link, nothing passed on inside a node (DeepSpeed ZeRO-3)"""
    tp_overlap: bool = False
    """tensor-parallel exchanges run beside the products they feed, in pieces"""
    dp_overlap: bool = True
    """gradients are sent while the backward pass goes on, gathered weights come ahead of it"""
    pp_overlap: bool = True
    """an interleaved pipeline sends while it computes"""
    ep_overlap: bool = True
    """an interleaved pipeline runs experts' exchanges beside another micro-batch"""
    fused_experts: bool = False
    """the experts of a device are one kernel with what surrounds them, rather than a product each"""
    flex_dispatch: bool = True
    """rows are sent once a node and without waiting for the host (DeepEP, HybridEP), not by a plain all-to-all"""
    graphs: bool = False
    """kernels are launched from CUDA graphs"""
    fused_layers: bool = False
    """norms and activation functions are fused kernels that keep only their 16-bit inputs"""
    fused_loss: bool = False
    """head and loss are one kernel that makes the gradients at once, in chunks by its own measure"""
    fused_blocks: bool = False
    """a block's passes are written as one: they move what they must, with no cast, transpose or sum between them"""
    eager_layers: bool = False
    """layers are torch's operators one by one, of which autograd keeps what each needs (our trainer on a CPU)"""
    fully_shard: bool = False
    """ZeRO stages are torch's fully_shard: fp32 shards stand beside what is gathered of them, layer by layer"""
    experts_over_tp: bool = True
    """ep may spread whole experts over tp ranks too, where dp × cp has too few"""
    balanced_stages: bool = False
    """pipeline stages are cut by FLOPs, the output projection counted (`spec.stages`), not by the number of layers"""
    narrow_experts: bool = True
    """products of experts, shared ones too, run in 8 or 4 bits like the others"""
    grad_bytes: float = 4.0
    """bytes of one gradient on the wire"""
    summed_bytes: float = 2.0
    """bytes of one gradient at rest"""
    narrow_alone: bool = False
    """one device that runs a single micro-batch a step has nothing to sum: gradients stay in 16 bits"""

    def with_numbers(self, numbers: Mapping[str, float]) -> Software:
        """The same settings with these fitted numbers and no others."""
        changes: dict[str, Any] = dict.fromkeys(PARAMETERS, 1.0) | dict(numbers)
        return replace(self, **changes)

    @property
    def fitted(self) -> dict[str, float]:
        """The declared numbers that are not 1."""
        return {name: getattr(self, name) for name in PARAMETERS if getattr(self, name) != 1.0}


PHYSICS = Software()
OURS = Software(
    name="armillary",
    fused_layers=True,
    fused_loss=True,
    fused_blocks=True,
    fully_shard=True,
    summed_bytes=4.0,
    narrow_alone=True,
    balanced_stages=True,
    fused_experts=True,
    flex_dispatch=False,
    ep_overlap=False,
    experts_over_tp=False,
    narrow_experts=False,
)
"""the trainer of this package on a GPU: facts of its code, nothing fitted"""
OURS_BY_LAYER = replace(OURS, fused_blocks=False)
"""where blocks run layer by layer: the same kernels, and sums and casts between them"""
OURS_ON_CPU = replace(
    OURS,
    fused_layers=False,
    fused_loss=False,
    fused_blocks=False,
    narrow_alone=False,
    eager_layers=True,
    fused_experts=False,
    dp_overlap=False,
    pp_overlap=False,
)
"""on a processor: plain operators, and the cores that would compute beside an exchange are the ones that carry it"""


def has_fused_block(model: ModelConfig) -> bool:
    """Whether our blocks of this shape are hand-written passes: norms before attention and a dense MLP, rotary
    positions, no biases, nothing done to queries and keys."""
    plain = model.norm_at == "before" and model.parallel == "none" and model.residual_scale == 1.0
    heads = model.positions == "rope" and model.qk_norm == "none" and model.qkv_clip is None
    biased = model.qkv_bias or model.out_bias or model.mlp_bias
    dense = all(kind.mlp == "dense" and kind.rope for kind in model.layers)
    return plain and heads and dense and not biased and not model.mla and not model.simplicial


def software(framework: str, *, chip: str = "", fitted: bool = True) -> Software:
    """The declared framework whose name `framework` starts with, as of the release that follows it; physics for any
    other. `fitted=False` keeps its settings and sets its fitted numbers to 1."""
    name, _, release = framework.strip().partition(" ")
    found = next((known for known in _table() if known.lower() == name.lower()), None)
    if found is None:
        return replace(PHYSICS, name=framework or "physics")
    declared = replace(_declared(found), **_since(found, release, chip))
    return declared if fitted else declared.with_numbers({})


def declared() -> dict[str, Software]:
    """Every framework of frameworks.toml."""
    return {name: _declared(name) for name in _table()}


def _since(name: str, release: str, chip: str) -> dict[str, Any]:
    """Settings that came with this release or an earlier one, on this chip."""
    settings: dict[str, Any] = {}
    for change in _table()[name].get("since", ()):
        if _numbers(release) >= _numbers(change["release"]) and chip in change.get("chips", [chip]):
            settings |= {key: value for key, value in change.items() if key in _SETTINGS}
    return settings


def _numbers(release: str) -> tuple[int, ...]:
    """'26.02.01' -> (26, 2, 1); without digits it counts as the newest."""
    return tuple(int(part) for part in re.findall(r"\d+", release)) or (9999,)


@cache
def _declared(name: str) -> Software:
    table = _table()[name]
    numbers: Mapping[str, float] = table.get("fitted", {})
    if len(numbers) > MOST_PARAMETERS or not set(numbers) <= set(PARAMETERS):
        raise BadInput(f"{name} declares {sorted(numbers)}; at most {MOST_PARAMETERS} of {', '.join(PARAMETERS)}")
    settings: dict[str, Any] = {key: value for key, value in table.items() if key in _SETTINGS}
    return Software(name=name, **settings).with_numbers(numbers)


_SETTINGS = {field.name for field in fields(Software)} - {"name", *PARAMETERS}


@cache
def _table() -> dict[str, Any]:
    with (Path(__file__).parent / "frameworks.toml").open("rb") as file:
        sections = tomllib.load(file)
    return {name: section for name, section in sections.items() if isinstance(section, dict)}
