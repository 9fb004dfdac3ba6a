"""Software: what a framework does beside the physics, as settings that are facts and at most two fitted factors.

The physics alone has no fitted factor. The declared ones are in frameworks.toml with their date and how to fit them.
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
"""times that a framework's fitted factors may multiply"""
MOST_PARAMETERS = 2
COMMON = "common"
"""section of frameworks.toml for frameworks without numbers of their own"""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A framework as the planner sees it: factors on the times of PARAMETERS (`experts`: routed GEMMs and the
    operations around them, where they are not fused), and settings that are facts."""

    name: str = "physics"
    gemm: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    communication: float = 1.0
    host: float = 1.0
    experts: float = 1.0
    attention_kernel: str = "attention"
    """fused attention: 'attention', the chip generation's own, or 'flash_2'"""
    flat_gathers: bool = False
    """sharded weights reach every rank over its own network link, not forwarded inside a node (DeepSpeed ZeRO-3)"""
    tp_overlap: bool = False
    """tensor-parallel communication overlaps the GEMMs it feeds, in chunks"""
    dp_overlap: bool = True
    """gradients are reduced beside the backward pass, and weights are all-gathered ahead of their use"""
    pp_overlap: bool = True
    """an interleaved pipeline sends beside compute"""
    ep_overlap: bool = True
    """an interleaved pipeline overlaps all-to-alls with another micro-batch"""
    ep_overlap_alone: bool = False
    """so does a model without a pipeline"""
    fused_experts: bool = False
    """the experts of a device are one kernel with the operations around them, rather than one GEMM each"""
    flex_dispatch: bool = True
    """rows are sent once per node and without host synchronisation (DeepEP, HybridEP), not by a plain all-to-all"""
    static_shapes: bool = False
    """experts take a fixed number of rows (tokens beyond it are dropped), so that nothing waits for the host"""
    graphs: bool = False
    """kernels are launched from CUDA graphs"""
    fused_layers: bool = False
    """norms and activation functions are fused kernels that store only their 16-bit inputs"""
    fused_cross_entropy: bool = False
    """softmax and loss are one kernel that overwrites the logits with their gradient; the head is not part of it"""
    fused_loss: bool = False
    """head and loss are one kernel that computes the gradients at once, in chunks of its own size"""
    fused_blocks: bool = False
    """a block is a hand-written fused function: it moves the compulsory bytes, without casts, transposes or sums"""
    eager_layers: bool = False
    """layers are eager torch operators, of which autograd stores what each needs (our trainer on a CPU)"""
    fully_shard: bool = False
    """ZeRO stages are torch's fully_shard: fp32 shards beside what is all-gathered from them, layer by layer"""
    experts_over_tp: bool = True
    """ep may span the tp ranks too, where dp × cp is too small"""
    balanced_stages: bool = False
    """pipeline stages are split by FLOPs, the output projection included, not by the number of layers"""
    stops_early: bool = False
    """full recompute stops at the last activation that the backward pass reads, so that a layer's last GEMM is not
    repeated (torch's checkpoint without re-entrant autograd, from 2.1)"""
    adapter_dropout: bool = False
    """the inputs of adapters pass through dropout"""
    adapters: str = "attention"
    """matrices with adapters where a row does not name them: attention (queries and values), or everywhere"""
    narrow_head: bool = False
    """the output projection runs in 8 or 4 bits too"""
    narrow_experts: bool = True
    """GEMMs of experts, shared ones too, run in 8 or 4 bits like the others"""
    interleaves: bool = True
    """a pipeline may have several chunks of layers per stage"""
    reports_reserved: bool = False
    """memory is reported as what the allocator reserves, not as what is allocated from it"""
    grad_bytes: float = 4.0
    """bytes per gradient on the wire"""
    summed_bytes: float = 2.0
    """bytes per accumulated gradient"""
    narrow_alone: bool = False
    """one device with a single micro-batch per step has nothing to sum: gradients stay in 16 bits"""

    def with_numbers(self, numbers: Mapping[str, float]) -> Software:
        """The same settings with these fitted factors and no others."""
        changes: dict[str, Any] = dict.fromkeys(PARAMETERS, 1.0) | dict(numbers)
        return replace(self, **changes)

    @property
    def fitted(self) -> dict[str, float]:
        """The declared factors that are not 1."""
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
"""our trainer on a GPU: facts of its code, nothing fitted"""
OURS_BY_LAYER = replace(OURS, fused_blocks=False)
"""our trainer where blocks run layer by layer: the same kernels, with sums and casts between them"""
OURS_ON_CPU = replace(
    OURS,
    fused_layers=False,
    fused_loss=False,
    fused_blocks=False,
    narrow_alone=False,
    eager_layers=True,
    stops_early=True,
    fused_experts=False,
    dp_overlap=False,
    pp_overlap=False,
)
"""our trainer on a CPU: eager operators, and the cores that would compute also carry the communication"""


def has_fused_block(model: ModelConfig) -> bool:
    """Whether blocks of this shape have a hand-written fused function: pre-norm, a dense MLP, rotary positions, no
    biases or gates, no norm or clip on queries and keys, attention in every layer."""
    plain = model.norm_at == "before" and model.parallel == "none" and model.residual_scale == 1.0
    heads = model.positions == "rope" and model.qk_norm == "none" and model.qkv_clip is None
    biased = model.qkv_bias or model.out_bias or model.mlp_bias
    dense = all(kind.mlp == "dense" and kind.rope for kind in model.layers)
    gated = model.attention_gate or model.num_recurrent_layers > 0
    return plain and heads and dense and not biased and not gated and not model.mla and not model.simplicial


def software(framework: str, *, chip: str = "", model: str = "", precision: str = "", fitted: bool = True) -> Software:
    """The declared framework whose name `framework` starts with, as of the release that follows it; the physics for any
    other. One without numbers of its own has those that the others have in common. `fitted=False` keeps its settings
    and sets every number to 1."""
    name, _, release = framework.strip().partition(" ")
    known = next((known for known in declared() if known.lower() == name.lower()), None)
    if known is None:
        chosen = replace(PHYSICS, name=framework or "physics")
    else:
        chosen = replace(_declared(known), **_since(known, release, chip, model, precision))
    if not fitted:
        return chosen.with_numbers({})
    return chosen if chosen.fitted else chosen.with_numbers(common_numbers())


@cache
def common_numbers() -> Mapping[str, float]:
    """Factors that the frameworks with published rows have in common, for those without."""
    numbers: Mapping[str, float] = _table()[COMMON]["fitted"]
    return numbers


def interval_width(framework: str) -> float:
    """Half-width of a 90 % interval, in units of a prediction's spread (planning.training.uncertainty)."""
    name = framework.strip().partition(" ")[0].lower()
    known = any(name == other.lower() and software.fitted for other, software in declared().items())
    widths: Mapping[str, float] = _table()[COMMON]["widths"]
    return widths["known" if known else "unknown"]


def declared() -> dict[str, Software]:
    """Every framework of frameworks.toml."""
    return {name: _declared(name) for name in _table() if name != COMMON}


def _since(name: str, release: str, chip: str, model: str, precision: str) -> dict[str, Any]:
    """Settings that came with this release or an earlier one, on this chip, in the recipe of this model."""
    settings: dict[str, Any] = {}
    for change in _table()[name].get("since", ()):
        own = any(model.startswith(known) for known in change.get("models", [""]))
        own = own and chip in change.get("chips", [chip]) and precision in change.get("precisions", [precision])
        if own and _numbers(release) >= _numbers(change["release"]):
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
    sections = tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text(encoding="utf-8"))
    return {name: section for name, section in sections.items() if isinstance(section, dict)}
