"""Weights go into shards a tensor at a time, the same whatever the layout, and come back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import save_model
from armillary.parallel.apply import apply
from armillary.parallel.mesh import make_mesh
from armillary.parallel.shard_weights import fill_from, fill_random, full_tensor, materialise
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.parity.case import tiny
from armillary.training.step.lora import add_lora
from tests.ranks import Ranks

LAYOUTS = [
    Layout(dp=4),
    Layout(dp=4, zero=3),
    Layout(dp=4, zero=3, shard=2),
    Layout(dp=2, tp=2, zero=3),
    Layout(tp=4),
]


def on_meta(config: ModelConfig, layout: Layout, job: TrainJob | None = None) -> Transformer:
    """Built, given adapters and spread, without a byte of weights."""
    with torch.device("meta"):
        model = Transformer(config)
    add_lora(model, job or TrainJob())
    with join_world("cpu") as world:
        apply(model, layout, make_mesh(layout, world))
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def drawn(layouts: list[Layout], rank: int) -> list[tuple[dict[str, Tensor], int]]:
    """(whole weights, elements that this rank holds) of every layout."""
    found = []
    for layout in layouts:
        model = on_meta(tiny(positions="alibi"), layout, TrainJob(lora_rank=rank))
        materialise(model, "cpu")
        fill_random(model, seed=3)
        held = sum(local(parameter).numel() for parameter in model.parameters())
        found.append(({name: full_tensor(p).clone() for name, p in model.named_parameters()}, held))
    return found


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize("rank", [0, 2], ids=["model", "with adapters"])
def test_every_layout_starts_from_the_same_weights(ranks: Ranks, rank: int) -> None:
    model = build(tiny(positions="alibi"), dtype=torch.float32, device="cpu", seed=3)
    add_lora(model, TrainJob(lora_rank=rank, seed=3))
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    size = sum(tensor.numel() for tensor in wanted.values())
    for on_rank in ranks.run(4, drawn, LAYOUTS, rank):
        for layout, (weights, held) in zip(LAYOUTS, on_rank, strict=True):
            assert weights.keys() == wanted.keys()
            assert all(torch.equal(weights[name], wanted[name]) for name in wanted), layout
            assert held <= (size if layout == Layout(dp=4) else 0.6 * size), layout


def read(folder: Path, layout: Layout) -> dict[str, Tensor]:
    model = on_meta(tiny(kv_heads=4), layout)
    materialise(model, "cpu")
    fill_from(model, folder)
    return {name: full_tensor(p).clone() for name, p in model.named_parameters()}


def test_a_hugging_face_folder_is_read_into_shards(ranks: Ranks, tmp_path: Path) -> None:
    model = build(tiny(kv_heads=4), dtype=torch.float32, device="cpu", seed=5)
    save_model(model, tmp_path / "model")
    for weights in ranks.run(4, read, tmp_path / "model", Layout(dp=2, tp=2, zero=3)):
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def save_shards(folder: Path, layout: Layout) -> None:
    model = on_meta(tiny(), layout)
    materialise(model, "cpu")
    fill_random(model, seed=7)
    dcp.save(dict(model.named_parameters()), checkpoint_id=folder)


def load_shards(folder: Path, layout: Layout) -> dict[str, Tensor]:
    model = on_meta(tiny(), layout)
    materialise(model, "cpu")
    fill_random(model, seed=8)
    dcp.load(dict(model.named_parameters()), checkpoint_id=folder)
    return {name: full_tensor(p).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(dp=2, tp=2, zero=3), Layout(dp=2, zero=3)),
        (Layout(dp=4, zero=3, shard=2), Layout(tp=2)),
        (Layout(tp=4), Layout(dp=2)),
    ],
    ids=["fsdp × tp to fsdp", "hsdp to tp", "tp to ddp"],
)
def test_torchs_checkpoints_move_between_layouts(ranks: Ranks, tmp_path: Path, first: Layout, then: Layout) -> None:
    """With a vocabulary that no layout divides."""
    wanted = build(tiny(), dtype=torch.float32, device="cpu", seed=7)
    ranks.run(4, save_shards, tmp_path, first)
    for weights in ranks.run(2, load_shards, tmp_path, then):
        assert all(torch.equal(weights[name], p) for name, p in wanted.named_parameters())
