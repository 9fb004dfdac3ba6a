"""A case of the parity matrix: a tiny model on a layout for some steps, what came of it, and how far two are apart.

Every layout reads the same rows of the same batches, which are a function of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig, MoE

ROWS, SEQUENCE = 16, 16


def tiny(**changes: Any) -> ModelConfig:
    """A dense model that every layout of up to 8 ranks divides."""
    base: dict[str, Any] = dict(
        name="tiny", hidden=16, heads=8, kv_heads=8, head_dim=4, ffn=24, vocab=37, context=64, layers=(LayerKind(),) * 2
    )
    return ModelConfig(**(base | changes))


def mixture(**changes: Any) -> ModelConfig:
    """The same with experts in its second layer, a shared one, and a bias that chooses."""
    moe = MoE(num_experts=8, top_k=2, ffn=8, shared_ffn=16, score="sigmoid", selection_bias=True)
    return tiny(**({"moe": moe, "layers": (LayerKind(), LayerKind(mlp="moe"))} | changes))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout for some steps."""

    layout: Layout
    config: ModelConfig = field(default_factory=tiny)
    dtype: str = "fp32"
    steps: int = 5
    accumulate: int = 1
    chunk: int = 0
    documents: bool = False
    clip: float = 1.0
    lora: int = 0
    capacity: float | None = None
    """of experts"""
    lora_on: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    meta: bool = False
    """built on the meta device; weights are drawn after sharding"""
    compile: bool = False

    def alone(self) -> Case:
        """The same steps in one process, plainly."""
        plain_layout = Layout(precision=self.layout.precision)
        return replace(self, layout=plain_layout, accumulate=1, chunk=0, compile=False, meta=False)


@dataclass(frozen=True)
class Outcome:
    """What the steps gave."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gauges: list[dict[str, float]] = field(default_factory=list)
    """of the routers"""


def batch(case: Case, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets (some of which do not count) and documents, the same for every layout."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randint(case.config.vocab, (ROWS, SEQUENCE + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    documents = (torch.rand(targets.shape, generator=generator) < 0.2).long().cumsum(1)
    return drawn[:, :-1], targets, documents


def error(outcome: Outcome, wanted: Outcome) -> dict[str, float]:
    """The largest relative differences: of losses, gradient norms and weights (each to its own norm)."""
    assert outcome.weights.keys() == wanted.weights.keys()
    return {
        "loss": max(map(_relative, outcome.losses, wanted.losses)),
        "norm": max(map(_relative, outcome.norms, wanted.norms)),
        "weights": max(_relative(outcome.weights[name], tensor) for name, tensor in wanted.weights.items()),
    }


def _relative(found: Tensor | float, wanted: Tensor | float) -> float:
    """|found - wanted| / |wanted|, and infinite where either is not finite."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
    assert a.shape == b.shape
    value = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return value if math.isfinite(value) else math.inf
