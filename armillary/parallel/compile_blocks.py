"""Compile per block: blocks of one class share one graph, and FSDP's hooks around a block stay outside it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from armillary.model.transformer import Transformer
from armillary.parallel.collectives import Group
from armillary.parallel.local_tensors import local_shards_ready
from armillary.parallel.mesh import Mesh


def compile_blocks(model: Transformer, tp: Group | None = None, *, overlap: bool = False) -> None:
    """Compile every block's forward; with `overlap`, tensor-parallel collectives are pipelined with the GEMMs."""
    if tp is not None and overlap:
        _pipeline_collectives(tp)
    for block in model.blocks.values():
        compiled = torch.compile(block.forward)
        block.forward = compiled if tp is None else partial(_with_local_shards, block, compiled)


def can_fold(mesh: Mesh) -> bool:
    """Whether tensor-parallel ranks share memory: GPUs of one machine that reach each other."""
    if mesh.world.device.type != "cuda" or not mesh.is_on_one_machine("tp"):
        return False
    peers = range(1, torch.cuda.device_count())
    return len(peers) > 0 and all(torch.cuda.can_device_access_peer(0, other) for other in peers)


def _pipeline_collectives(tp: Group) -> None:
    """torch's asynchronous tensor parallelism: GEMMs are split along with the all-gathers and reduce-scatters next to
    them, over memory that the ranks of one machine share."""
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # called needless by its deprecation, while the compiler still asks whether it was called (2.11 to 2.13)
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp.name)


def _with_local_shards(block: nn.Module, compiled: Callable[..., Tensor], *args: Any) -> Tensor:
    with local_shards_ready(block):
        return compiled(*args)
