"""Weights into shards and out of them, one tensor at a time: no device ever holds a full model that it shards.

A model is built on meta, sharded, given memory, and then every tensor is drawn or read in full on the host and this
rank keeps its shard; so every layout starts from the same weights.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from armillary.model import lora
from armillary.model.moe.experts import Router
from armillary.model.transformer import Progress, Transformer
from armillary.model.weights.hf_weights import check_head, fill
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.parallel.collectives import Group, all_gather
from armillary.parallel.local_tensors import local_shard


def materialise(model: Transformer, device: torch.device | str) -> None:
    """Memory for this rank's shards, on its device; the weights are not yet written."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


@torch.no_grad()
def fill_random(model: Transformer, *, seed: int, progress: Progress | None = None) -> None:
    """This rank's shard of what (seed, name) draws for each tensor; adapters included."""
    model.initialize(seed=seed, progress=progress, put=copy_shard)
    fill_adapters(model, seed=seed)


@torch.no_grad()
def fill_from(model: Transformer, folder: Path | str, *, seed: int = 0, progress: Progress | None = None) -> None:
    """The weights of a Hugging Face folder; adapters, which no folder has, are drawn."""
    with TensorFolder(Path(folder)) as stored:
        check_head(model.config, stored)
        fill(model, stored, progress, put=copy_shard)
    fill_adapters(model, seed=seed)


@torch.no_grad()
def fill_adapters(model: nn.Module, *, seed: int) -> None:
    lora.draw(model, seed=seed, put=copy_shard)


@torch.no_grad()
def copy_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of a full tensor into a parameter."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    for mesh, placement in _shardings(parameter):
        full = local_shard(full, placement, mesh.size(), mesh.get_local_rank())
    parameter._local_tensor.copy_(full)


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
