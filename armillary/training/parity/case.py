"""A few training steps of a tiny model on any layout, to compare layouts with one process.

`steps(case)` runs on every rank, or alone where the layout is of one device; what comes back is the losses, gradient
norms and full weights. Every layout reads the same rows of the same batches, which are a function of the step.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.kernels.core.dtype import DTYPES
from armillary.model.layers.attention_forms import packed, plain
from armillary.model.moe.experts import Router
from armillary.model.transformer import Transformer, build
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.mesh import Mesh, make_mesh
from armillary.parallel.pipeline.pipeline import Rows, StageFns
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.shard_weights import fill_random, materialise
from armillary.parallel.world import World, join_world
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import axis_sizes
from armillary.spec.model import MLA, GatedDelta, LayerKind, ModelConfig, MoE, Rope, Simplicial
from armillary.spec.tables.train import TrainJob
from armillary.training.setup.kernel_selection import use_kernels
from armillary.training.step.lora import add_lora
from armillary.training.step.loss import loss_sum
from armillary.training.step.numerics import autocast
from armillary.training.step.optimizer import set_learning_rate
from armillary.training.step.optimizer_offload import optimizer_of
from armillary.training.step.router_balance import Routers

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


def latent(**changes: Any) -> ModelConfig:
    """DeepSeek-style: the same with latent attention and grouped routing."""
    mla = MLA(q_rank=12, kv_rank=8, nope_dim=4, rope_dim=2, v_dim=3)
    moe = MoE(
        num_experts=8,
        top_k=2,
        ffn=8,
        shared_ffn=16,
        score="sigmoid",
        selection_bias=True,
        groups=4,
        top_groups=2,
        routed_scale=1.5,
    )
    return mixture(**({"mla": mla, "moe": moe, "rope": Rope(interleaved=True)} | changes))


def gpt_oss(**changes: Any) -> ModelConfig:
    """GPT-OSS-style: sinks, a sliding and a full layer, biases everywhere, clamped SwiGLU, experts in every layer."""
    moe = MoE(num_experts=8, top_k=2, ffn=8, score="softmax_topk", router_bias=True, expert_bias=True)
    base: dict[str, Any] = dict(
        moe=moe,
        layers=(LayerKind(attention="sliding", mlp="moe"), LayerKind(mlp="moe")),
        window=5,
        sinks=True,
        qkv_bias=True,
        out_bias=True,
        activation="swiglu_clamped",
    )
    return tiny(**(base | changes))


def qwen3_next(**changes: Any) -> ModelConfig:
    """Qwen3-Next-style: a gated delta-net layer and a gated attention layer, norms with 1 + w, experts in both with a
    gated shared one."""
    moe = MoE(num_experts=8, top_k=2, ffn=8, shared_ffn=16, shared_gate=True)
    base: dict[str, Any] = dict(
        moe=moe,
        layers=(LayerKind(attention="gated_delta", mlp="moe"), LayerKind(mlp="moe")),
        gated_delta=GatedDelta(key_heads=8, value_heads=16, key_dim=4, value_dim=4),
        attention_gate=True,
        norm_plus_one=True,
        qk_norm="head",
        norm_eps=1e-3,  # with 1e-5, norms of the small outputs make one process differ from itself by 2e-5 in fp32
        rope=Rope(fraction=0.5),
    )
    return tiny(**(base | changes))


def simplicial(**changes: Any) -> ModelConfig:
    """A layer that attends to pairs of tokens and a plain one."""
    base: dict[str, Any] = dict(
        layers=(LayerKind(attention="2-simplicial"), LayerKind()),
        simplicial=Simplicial(window_1=3, window_2=6),
        qk_norm="head",
        norm_eps=1e-3,  # as in qwen3_next
    )
    return tiny(**(base | changes))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout for some steps. `capacity` is that of experts; with `meta` the model is built on the meta
    device, and weights are drawn after sharding. Ranks may share one `device`.

    `eps` is AdamW's. A gradient g below it is multiplied by up to learning rate / eps in the step: at 3e-3 and 1e-8 a
    rounding error of 3e-11 in an element whose exact gradient is 4e-9 moves that weight by 9e-6."""

    layout: Layout
    config: ModelConfig = field(default_factory=tiny)
    dtype: str = "fp32"
    steps: int = 5
    accumulate: int = 1
    eps: float = 1e-8
    chunk: int = 0
    documents: bool = False
    clip: float = 1.0
    lora: int = 0
    capacity: float | None = None
    lora_on: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    meta: bool = False
    compile: bool = False
    device: str = "cpu"

    def alone(self) -> Case:
        """The same steps in one process, plainly."""
        plain_layout = Layout(precision=self.layout.precision)
        return replace(self, layout=plain_layout, accumulate=1, chunk=0, compile=False, meta=False)


@dataclass(frozen=True)
class Outcome:
    """What the steps gave; `gauges` are the routers'."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gauges: list[dict[str, float]] = field(default_factory=list)


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


def _relative(measured: Tensor | float, wanted: Tensor | float) -> float:
    """|measured - wanted| / |wanted|, and infinite where either is not finite."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (measured, wanted))
    assert a.shape == b.shape
    value = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return value if math.isfinite(value) else math.inf


def steps(case: Case) -> Outcome:
    """On this rank; every rank gets the same outcome."""
    if case.layout.num_devices == 1:
        return run(case, World(rank=0, size=1, local_rank=0, device=torch.device(case.device)))
    with join_world(case.device) as world:
        return run(case, world)


def many(cases: list[Case]) -> list[Outcome]:
    """Several cases in one call of the pool; only the main rank's outcomes are worth sending."""
    outcomes = [steps(case) for case in cases]
    return outcomes if not dist.is_initialized() or dist.get_rank() == 0 else []


def run(case: Case, world: World) -> Outcome:
    job = TrainJob(
        weight_decay=0.1,
        eps=case.eps,
        lora_rank=case.lora,
        lora_on=case.lora_on,
        seed=1,
        sequence=SEQUENCE,
        batch_tokens=ROWS * SEQUENCE,
        balance_loss=0.05,
        router_z_loss=1e-3,
        expert_capacity=case.capacity,
    )
    sharded = shard_model(case, job, world)
    routers = Routers(sharded, job)
    optimizer = optimizer_of(sharded, job, folder=Path(tempfile.gettempdir()))
    set_learning_rate(optimizer, 3e-3)  # at 1e-2 one process with four micro-batches differs from itself by 8e-6
    losses, norms, gauges = [], [], []
    for step in range(case.steps):
        routers.start()
        loss, norm = train_step(sharded, case, step)
        gauges.append({name: float(value) for name, value in routers.finish().items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        norms.append(float(norm))
    weights = {name: sharded.full_tensor(name).to("cpu", copy=True) for name in names(sharded)}
    return Outcome(losses, norms, weights, gauges)


def names(sharded: Sharded) -> list[str]:
    """Of the full model's parameters."""
    if sharded.pipeline is None:
        return [name for name, _ in sharded.model.named_parameters()]
    with torch.device("meta"):
        return [name for name, _ in Transformer(sharded.model.config).named_parameters()]


def shard_model(case: Case, job: TrainJob, world: World) -> Sharded:
    """The model with its initial weights, sharded before or after they are drawn."""
    # alone even among ranks, where make_mesh would communicate
    mesh = make_mesh(case.layout, world) if world.size > 1 else Mesh(axis_sizes(case.layout), world)
    later = case.meta or case.layout.pp > 1
    if later:
        with torch.device("meta"):
            model: Transformer = (
                make_stage_model(case.config, case.layout, mesh.rank("pp"), sequence=SEQUENCE)
                if case.layout.pp > 1
                else Transformer(case.config)
            )
    else:
        model = build(case.config, dtype=DTYPES[case.dtype], device=world.device, seed=1)
    add_lora(model, job)
    use_kernels(model, job=job, layout=case.layout, device=torch.device("cpu"))  # plain layers on every device
    sharded = apply(model.to(DTYPES[case.dtype]), case.layout, mesh, loss=loss_sum, compile=case.compile)
    if sharded.activations is not None:
        sharded.activations.least_bytes = 1  # all of a model this small would stay
    if later:
        materialise(sharded.model, world.device)
        fill_random(sharded.model, seed=1)
    decide(sharded.model)
    return sharded


@torch.no_grad()
def decide(model: Transformer) -> None:
    """Routers with an opinion: a fresh one's scores are so alike in a model this small that rounding would decide."""
    for module in model.modules():
        if isinstance(module, Router):
            module._parameters["weight"].mul_(20.0)  # type: ignore[union-attr]


def train_step(sharded: Sharded, case: Case, step: int) -> tuple[Tensor, Tensor]:
    mesh = sharded.mesh
    tokens, targets, documents = (x.to(mesh.world.device) for x in batch(case, step))
    count = int((targets != -100).sum())
    rows = slice(*(ROWS // mesh.dp_size * n for n in (mesh.dp_rank, mesh.dp_rank + 1)))
    if sharded.pipeline is not None:
        return pipelined(sharded, case, tokens[rows], targets[rows], documents[rows], count)
    micro = list(zip(*(x[rows].chunk(case.accumulate) for x in (tokens, targets, documents)), strict=True))
    total = torch.zeros((), dtype=DTYPES[case.dtype], device=tokens.device)
    for number, (tokens_bT, targets_bT, documents_bT) in enumerate(micro):
        attend = packed(documents_bT) if case.documents else plain
        positions_bT = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens_bT)
        if sharded.context is not None:
            attend = sharded.context.attend(documents_bT if case.documents else None)
            tokens_bT, targets_bT, positions_bT = map(sharded.context.shard, (tokens_bT, targets_bT, positions_bT))
        with sharded.accumulate(last=number + 1 == len(micro)):
            with _autocast(sharded):
                hidden = sharded.model(tokens_bT, positions_bT, attend)
                loss = sharded.loss_sum(hidden, targets_bT, chunk=case.chunk) / count
            loss.backward()
        total += loss.detach()
    return sharded.total(total), sharded.clip(case.clip)


def _autocast(sharded: Sharded) -> AbstractContextManager[Any]:
    device = sharded.mesh.world.device
    return autocast(sharded.layout.precision, device, wanted=not sharded.is_fsdp)


def pipelined(
    sharded: Sharded, case: Case, tokens: Tensor, targets: Tensor, documents: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The same step through the stages."""
    assert sharded.pipeline is not None
    cut = sharded.context.shard if sharded.context is not None else lambda x: x
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    rows = Rows(
        tokens_BT=cut(tokens),
        targets_BT=cut(targets),
        positions_BT=cut(positions),
        documents_BT=documents if case.documents else None,
    )
    attends = sharded.context.attend if sharded.context is not None else lambda x: plain if x is None else packed(x)
    stage_fns = StageFns(
        attends=attends,
        autocast=lambda: _autocast(sharded),
        scale=lambda loss: loss,
        loss=lambda model, hidden, y: sharded.loss_sum(hidden, y, chunk=case.chunk, model=model) / count,
    )
    total = sharded.pipeline.step(rows, stage_fns, num_micro_batches=case.accumulate)
    sharded.finish_gradients()
    return sharded.total(total), sharded.clip(case.clip)
