"""Weights into shards and out of them, a tensor at a time: no device ever holds a whole model it was to share.

A model is built on meta, spread, given memory, and then every tensor is drawn or read whole on the host and this rank
keeps its piece; so every layout starts from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def materialise(model: Transformer, device: torch.device | str) -> None:
    """Memory for this rank's shards, on its device; the weights are not yet written."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


@torch.no_grad()
def fill_random(model: Transformer, *, seed: int, progress: Progress | None = None) -> None:
    """What (seed, name) draws for each tensor, and this rank's piece of it; adapters included."""
    model.initialize(seed=seed, progress=progress, put=put_piece)
    fill_adapters(model, seed=seed)


@torch.no_grad()
def fill_from(model: Transformer, folder: Path | str, *, seed: int = 0, progress: Progress | None = None) -> None:
    """The weights of a Hugging Face folder; adapters, which no folder has, are drawn."""
    with TensorFolder(Path(folder)) as stored:
        check_head(model.config, stored)
        fill(model, stored, progress, put=put_piece)
    fill_adapters(model, seed=seed)


@torch.no_grad()
def fill_adapters(model: nn.Module, *, seed: int) -> None:
    lora.draw(model, seed=seed, put=put_piece)


@torch.no_grad()
def put_piece(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's piece of a whole tensor into a parameter."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    piece = whole
    for mesh, placement in _cuts(parameter):
        if not placement.is_replicate():
            dim = _dim(placement)
            start, length = _span(piece.shape[dim], mesh.size(), mesh.get_local_rank())
            piece = piece.narrow(dim, start, length)
    parameter._local_tensor.copy_(piece)


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """The whole of a parameter, on every rank; all ranks call it, in the same order."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    cuts = [(mesh, place) for mesh, place in _cuts(parameter) if not place.is_replicate()]
    sizes = _sizes(parameter.shape, cuts)
    piece = parameter.detach()._local_tensor
    for (mesh, place), size in reversed(list(zip(cuts, sizes, strict=True))):
        piece = _joined(piece, mesh, _dim(place), size)
    return piece


def _sizes(shape: torch.Size, cuts: list[tuple[DeviceMesh, Placement]]) -> Iterator[int]:
    """Along the dim that each cut goes through: the size before it, on this rank."""
    left = list(shape)
    for mesh, place in cuts:
        dim = _dim(place)
        yield left[dim]
        left[dim] = _span(left[dim], mesh.size(), mesh.get_local_rank())[1]


def _joined(piece: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """Pieces of all ranks side by side; shorter ones are padded to travel."""
    longest = -(-size // mesh.size())
    padding = [0, 0] * (piece.ndim - 1 - dim) + [0, longest - piece.shape[dim]]
    return all_gather(F.pad(piece, padding), Group.of(mesh), dim).narrow(dim, 0, size)


def _cuts(tensor: DTensor) -> list[tuple[DeviceMesh, Placement]]:
    """In the order in which a tensor was cut: tp first, then what FSDP cut of a tp rank's piece."""
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    found = [(tensor.device_mesh[name], place) for name, place in zip(names, tensor.placements, strict=True)]
    return found[::-1]


def _dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]


def _span(size: int, parts: int, number: int) -> tuple[int, int]:
    """(start, length) of one of the parts into which torch cuts `size`: equal ones, the last shorter or empty."""
    each = -(-size // parts)
    start = min(number * each, size)
    return start, min(each, size - start)
