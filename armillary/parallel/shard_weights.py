"""Weights into shards and out of them, a block at a time: no rank ever holds a full tensor that it shards.

A model is built on meta, sharded and given memory; then every rank draws its own values, or reads its own slices of the
stored tensors. Every layout starts from the same weights, bit for bit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from armillary.model import lora
from armillary.model.moe.experts import Router
from armillary.model.random_values import Part, all_of
from armillary.model.transformer import Progress, Transformer
from armillary.model.weights.hf_weights import full_names
from armillary.parallel.collectives import Group, all_gather
from armillary.parallel.consensus import Consensus
from armillary.parallel.loading.model_folder import load_folder
from armillary.parallel.loading.read_plan import Need, box_need, shard_box
from armillary.parallel.loading.shard_loader import Loaded
from armillary.parallel.local_tensors import local_shard


def materialise(model: Transformer, device: torch.device | str) -> None:
    """Memory for this rank's shards, on its device; the weights are not yet written."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


@torch.no_grad()
def fill_random(model: Transformer, *, seed: int, progress: Progress | None = None) -> None:
    """This rank's shard of the random weights of a seed; adapters included."""
    model.initialize(seed=seed, progress=progress, part_of=local_part)
    fill_adapters(model, seed=seed)


@torch.no_grad()
def fill_from(
    model: Transformer,
    folder: Path | str,
    *,
    seed: int = 0,
    ranks: Consensus | None = None,
    machines: Sequence[str] = (),
    progress: Progress | None = None,
) -> Loaded:
    """The weights of a Hugging Face folder; adapters, which no folder has, are drawn. With `ranks`, which all call this
    together, and the machine of each of them, every byte is read once per machine."""
    stored = {name: tensor for name, tensor in full_names(model).items() if not name.endswith(lora.NAMES)}
    targets, needs = local_needs(stored)
    loaded = load_folder(model, folder, targets, needs, ranks=ranks, machines=machines, progress=progress)
    fill_adapters(model, seed=seed)
    return loaded


@torch.no_grad()
def fill_adapters(model: nn.Module, *, seed: int) -> None:
    lora.draw(model, seed=seed, part_of=local_part)


def local_needs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Need]]:
    """This rank's part of each tensor, and what of the tensor that is."""
    parts = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
    needs = {name: box_need(part.shape, part.offsets, part.local.shape) for name, part in parts.items()}
    return {name: part.local for name, part in parts.items()}, needs


def local_part(parameter: Tensor) -> Part:
    """What this rank holds of a parameter."""
    if not isinstance(parameter, DTensor):
        return all_of(parameter)
    shards = [
        (int(placement.dim), mesh.size(), mesh.get_local_rank())  # type: ignore[attr-defined]
        for mesh, placement in _shardings(parameter)
        if not placement.is_replicate()
    ]
    offsets, sizes = shard_box(parameter.shape, shards)
    local = parameter._local_tensor
    assert tuple(local.shape) == sizes, f"a shard of {list(local.shape)} where {list(sizes)} are planned"
    return Part(local, offsets, tuple(parameter.shape))


@torch.no_grad()
def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter, all-gathered on every rank; all ranks call it, in the same order."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    steps: list[tuple[DeviceMesh, int, int]] = []  # mesh, dim, and the size of that dim before it was sharded
    remaining = torch.empty(parameter.shape, device="meta")
    for mesh, placement in _shardings(parameter):
        if not placement.is_replicate():
            dim = int(placement.dim)  # type: ignore[attr-defined]
            steps.append((mesh, dim, remaining.shape[dim]))
            remaining = local_shard(remaining, placement, mesh.size(), mesh.get_local_rank())
    shard = parameter.detach()._local_tensor
    for mesh, dim, size in reversed(steps):
        shard = _joined(shard, mesh, dim, size)
    return shard


def _joined(shard: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """All-gather along `dim`; shorter shards are padded."""
    longest = -(-size // mesh.size())
    padding = [0, 0] * (shard.ndim - 1 - dim) + [0, longest - shard.shape[dim]]
    return all_gather(F.pad(shard, padding), Group.of(mesh), dim).narrow(dim, 0, size)


def _shardings(tensor: DTensor) -> list[tuple[DeviceMesh, Placement]]:
    """In the order in which a tensor was sharded: tp first, then FSDP, which shards a tp rank's shard."""
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    placements = [(tensor.device_mesh[name], place) for name, place in zip(names, tensor.placements, strict=True)]
    return placements[::-1]
