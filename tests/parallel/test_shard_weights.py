"""Weights go into shards a tensor at a time, the same whatever the layout, and come back whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.errors import ArmillaryError
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.parallel.apply import apply
from armillary.parallel.loading.shard_loader import Loaded
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.shard_weights import fill_from, fill_random, full_tensor, materialise
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.loop import make_consensus
from armillary.training.parity.case import tiny
from armillary.training.parity.matrix import cases_of
from armillary.training.parity.strategies import ALL, layout_of
from armillary.training.step.lora import add_lora
from armillary.training.step.loss import loss_sum
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


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["model", "with adapters"])
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


def read(folder: Path, layout: Layout, machines: str, config: ModelConfig) -> tuple[dict[str, Tensor], Loaded]:
    """The full weights after a load, and what this rank read."""
    with join_world("cpu") as world:
        mesh = make_mesh(layout, world)
        with torch.device("meta"):
            model = (
                make_stage_model(config, layout, mesh.rank("pp"), sequence=16) if layout.pp > 1 else Transformer(config)
            )
        sharded = apply(model, layout, mesh, loss=loss_sum)
        materialise(model, "cpu")
        loaded = fill_from(model, folder, ranks=make_consensus(world), machines=machines)
        names = dict(build(config, dtype=torch.float32, device="meta").named_parameters())
        return {name: sharded.full_tensor(name).clone() for name in names}, loaded


@pytest.mark.parametrize(
    ("layout", "machines", "times"),
    [
        (Layout(dp=2, tp=2, zero=3), "aaaa", 1),
        (Layout(dp=4), "aaaa", 1),
        (Layout(dp=4, zero=3, shard=2), "aabb", 2),
        (Layout(pp=2, tp=2), "aaaa", 1),
        (Layout(tp=4), "aabb", 1.1),
    ],
    ids=["tp × fsdp", "ddp", "hsdp on two machines", "pp × tp", "tp on two machines"],
)
def test_a_folder_is_read_once_per_machine(
    ranks: Ranks, tmp_path: Path, layout: Layout, machines: str, times: float
) -> None:
    """`times` the tensors in the file: copies on two machines are read on both, and so are the norms of tp."""
    config = tiny(kv_heads=4, tied=True)
    model = build(config, dtype=torch.float32, device="cpu", seed=5)
    save_model(model, tmp_path / "model", dtype="bf16")
    model = load_model(tmp_path / "model", dtype="fp32")
    stored = 2 * sum(p.numel() for p in model.parameters())
    found = ranks.run(4, read, tmp_path / "model", layout, machines, config)
    for weights, _ in found:
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    total = sum(loaded.read_bytes for _, loaded in found)
    assert total == times * stored if times != 1.1 else stored < total <= times * stored
    assert max(loaded.read_bytes for _, loaded in found) <= total / 2, "the ranks share the work"


def fails_on_one(folder: Path, hf_copy: bool) -> str:
    """The error of every rank where the second cannot read."""
    with join_world("cpu") as world:
        mesh, ranks = make_mesh(Layout(dp=2), world), make_consensus(world)
        model = build(tiny(tied=True), dtype=torch.float32, device="cpu")
        if world.rank and not hf_copy:
            os.remove(folder / "model.safetensors")
        ranks.total(0.0)  # the other must not have it open already
        try:
            ranks.run_on_all(lambda: fill_from(model, folder, ranks=ranks, machines=mesh.machines))
        except ArmillaryError as error:
            return str(error)
    return ""


def test_what_one_rank_cannot_read_is_an_error_of_all(ranks: Ranks, tmp_path: Path) -> None:
    """Those that wait for its part do not wait forever."""
    config = tiny(tied=True)
    folder = save_model(build(config, dtype=torch.float32, device="cpu", seed=5), tmp_path / "model")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    first, second = ranks.run(2, fails_on_one, folder, True)
    assert first == second and "tied but lm_head.weight differs" in first
    first, second = ranks.run(2, fails_on_one, folder, False)
    assert first == second and "has no weights" in first


def drawn_as_alone(names: list[str]) -> list[str]:
    """Strategies whose initial weights differ from those of one process."""
    wrong = []
    for name in names:
        layout = layout_of(name, 8)
        assert layout is not None
        (case, *_) = cases_of(name, 8)
        config = case.config
        with join_world("cpu") as world:
            mesh = make_mesh(layout, world)
            with torch.device("meta"):
                model = (
                    make_stage_model(config, layout, mesh.rank("pp"), sequence=16)
                    if layout.pp > 1
                    else Transformer(config)
                )
            sharded = apply(model, layout, mesh, loss=loss_sum)
            materialise(model, "cpu")
            fill_random(model, seed=3)
            alone = build(config, dtype=torch.float32, device="cpu", seed=3)
            differ = [key for key, p in alone.named_parameters() if not torch.equal(sharded.full_tensor(key), p)]
        wrong += [f"{name}: {differ[0]}"] if differ else []
    return wrong


ON_EIGHT = [name for name in ALL if layout_of(name, 8) is not None]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_eight_ranks_draw_what_one_process_draws_in_every_layout(ranks: Ranks, part: int) -> None:
    assert len(ON_EIGHT) > 40
    assert ranks.run(8, drawn_as_alone, ON_EIGHT[part::6], timeout_s=600) == [[]] * 8


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
