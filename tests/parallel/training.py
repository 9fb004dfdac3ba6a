"""A few training steps of a tiny model on any layout, to hold layouts against one process.

`steps(case)` runs on every rank of a pool, or alone where the layout is of one device, on the same rows of the same
batches; what comes back is the losses, gradient norms and whole weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.model.attend import packed, plain
from armillary.model.transformer import Transformer, build
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.weights import fill_random, materialise, whole
from armillary.parallel.world import World, join_world
from armillary.spec.job import TrainJob
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.lora import add_lora
from armillary.training.loss import loss_sum
from armillary.training.optim import make_optimizer

ROWS, SEQUENCE = 16, 16
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def tiny(**changes: Any) -> ModelConfig:
    """A dense model that every layout of up to 8 ranks divides."""
    base = dict(
        name="tiny", hidden=16, heads=8, kv_heads=8, head_dim=4, ffn=24, vocab=37, context=64, layers=(LayerKind(),) * 2
    )
    return ModelConfig(**(base | changes))


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
    lora_on: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    meta: bool = False
    """built without weights, which are drawn when it is spread"""
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


def steps(case: Case) -> Outcome:
    """On this rank; every rank gets the same outcome."""
    if case.layout.num_devices == 1:
        return run(case, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    with join_world("cpu") as world:
        return run(case, world)


def many(cases: list[Case]) -> list[Outcome]:
    """Several cases in one call of the pool; only the main rank's outcomes are worth sending."""
    outcomes = [steps(case) for case in cases]
    return outcomes if not dist.is_initialized() or dist.get_rank() == 0 else []


def run(case: Case, world: World) -> Outcome:
    job = TrainJob(weight_decay=0.1, lora_rank=case.lora, lora_on=case.lora_on, seed=1)
    sharded = spread(case, job, world)
    optimizer = make_optimizer(sharded.model, job)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    losses, norms = [], []
    for step in range(case.steps):
        loss, norm = train_step(sharded, case, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        norms.append(float(norm))
    return Outcome(losses, norms, {name: whole(p).clone() for name, p in sharded.model.named_parameters()})


def spread(case: Case, job: TrainJob, world: World) -> Sharded:
    """The model with its first weights, spread before or after they are drawn."""
    if case.meta:
        with torch.device("meta"):
            model = Transformer(case.config)
    else:
        model = build(case.config, dtype=DTYPES[case.dtype], device="cpu", seed=1)
    add_lora(model, job)
    mesh = make_mesh(case.layout, world)
    sharded = apply(model.to(DTYPES[case.dtype]), case.layout, mesh, loss=loss_sum, compile=case.compile)
    if case.meta:
        materialise(sharded.model, "cpu")
        fill_random(sharded.model, seed=1)
    return sharded


def train_step(sharded: Sharded, case: Case, step: int) -> tuple[Tensor, Tensor]:
    tokens, targets, documents = batch(case, step)
    count = int((targets != -100).sum())
    mesh = sharded.mesh
    rows = slice(*(ROWS // mesh.dp_size * n for n in (mesh.dp_rank, mesh.dp_rank + 1)))
    micro = list(zip(*(x[rows].chunk(case.accumulate) for x in (tokens, targets, documents)), strict=True))
    total = torch.zeros((), dtype=DTYPES[case.dtype])
    for number, (tokens_bT, targets_bT, documents_bT) in enumerate(micro):
        attend = packed(documents_bT) if case.documents else plain
        positions_bT = torch.arange(SEQUENCE).expand_as(tokens_bT)
        with sharded.accumulate(last=number + 1 == len(micro)):
            hidden = sharded.model(tokens_bT, positions_bT, attend)
            loss = sharded.loss_sum(hidden, targets_bT, chunk=case.chunk) / count
            loss.backward()
        total += loss.detach()
    return sharded.total(total), sharded.clip(case.clip)


def batch(case: Case, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets (some of which do not count) and documents, the same for every layout."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randint(case.config.vocab, (ROWS, SEQUENCE + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    documents = (torch.rand(targets.shape, generator=generator) < 0.2).long().cumsum(1)
    return drawn[:, :-1], targets, documents


def error(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """The largest relative differences: of losses, gradient norms and weights (each to its own norm)."""
    assert found.weights.keys() == wanted.weights.keys()
    return {
        "loss": max(map(_relative, found.losses, wanted.losses)),
        "norm": max(map(_relative, found.norms, wanted.norms)),
        "weights": max(_relative(found.weights[name], tensor) for name, tensor in wanted.weights.items()),
    }


def _relative(found: Tensor | float, wanted: Tensor | float) -> float:
    """|found - wanted| / |wanted|, and infinite where either is no number."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
    assert a.shape == b.shape
    value = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return value if math.isfinite(value) else math.inf
