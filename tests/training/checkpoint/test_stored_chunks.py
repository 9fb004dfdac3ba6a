"""A rank reads the bytes of its own shards of a checkpoint, once per machine, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from armillary.errors import BadData
from armillary.model.transformer import Transformer, build
from armillary.parallel.apply import apply
from armillary.parallel.consensus import Consensus
from armillary.parallel.mesh import make_mesh
from armillary.parallel.shard_weights import fill_random, full_tensor, materialise
from armillary.parallel.world import join_world
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.store.runs import Run
from armillary.training.checkpoint import checkpoint
from armillary.training.checkpoint.stored_chunks import read_shards
from armillary.training.loop import make_consensus
from armillary.training.parity.case import mixture, tiny
from tests.ranks import Ranks


def filled(config: ModelConfig, layout: Layout, seed: int) -> tuple[dict[str, Tensor], Consensus, tuple[str, ...]]:
    with join_world("cpu") as world:
        mesh = make_mesh(layout, world)
        with torch.device("meta"):
            model = Transformer(config)
        apply(model, layout, mesh)
        materialise(model, "cpu")
        fill_random(model, seed=seed)
        return dict(model.named_parameters()), make_consensus(world), mesh.machines


def moved(folder: Path, config: ModelConfig, first: Layout, then: Layout) -> tuple[dict[str, Tensor], int]:
    """Saved in one layout, read in another: the full weights, and the bytes that this rank read."""
    tensors, ranks, _ = filled(config, first, 7)
    run = Run(folder=folder)
    checkpoint.save(run, 1, tensors, {}, ranks)
    tensors, ranks, machines = filled(config, then, 8)
    loaded = read_shards(run.checkpoint(1), tensors, ranks, machines)
    assert loaded is not None
    by_count = {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}
    tensors, ranks, machines = filled(config, then, 9)
    checkpoint.load(run.checkpoint(1), tensors, ranks, machines)
    assert all(torch.equal(full_tensor(tensors[name]), tensor) for name, tensor in by_count.items())
    return by_count, loaded.read_bytes


@pytest.mark.parametrize(
    ("config", "first", "then"),
    [
        (tiny(), Layout(dp=2, tp=2, zero=3), Layout(dp=4)),
        (tiny(), Layout(dp=4, zero=3, shard=2), Layout(tp=4)),
        (mixture(), Layout(dp=4, ep=2, zero=3), Layout(dp=2, tp=2, zero=3)),
    ],
    ids=["fsdp × tp to ddp", "hsdp to tp", "experts over ep to fsdp × tp"],
)
def test_a_checkpoint_is_read_once_by_any_layout(
    ranks: Ranks, tmp_path: Path, config: ModelConfig, first: Layout, then: Layout
) -> None:
    wanted = build(config, dtype=torch.float32, device="cpu", seed=7)
    found = ranks.run(4, moved, tmp_path, config, first, then)
    for weights, _ in found:
        assert all(torch.equal(weights[name], p) for name, p in wanted.named_parameters())
    assert sum(read for _, read in found) == sum(p.nbytes for p in wanted.parameters())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_torch_are_read_too_and_others_are_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "count": torch.tensor(7.0), "half": torch.randn(4).bfloat16()}
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    alone = Consensus(rank=0, size=1)
    assert read_shards(tmp_path, empty, alone) is not None
    assert all(torch.equal(empty[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(BadData, match=r"\(it lacks b\); name another run"):
        read_shards(tmp_path, {"b": torch.zeros(1)}, alone)
    with pytest.raises(BadData, match=r"a is \[5, 3\] and not \[3, 5\]"):
        read_shards(tmp_path, {"a": torch.zeros(3, 5)}, alone)
