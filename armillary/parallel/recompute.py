"""Activation recompute: which activations the backward pass recomputes instead of saving (Chen et al. 2016).

`full` saves only the input of a layer; `selective` saves the results of GEMMs, attention and collectives and recomputes
the cheap rest; either on one layer in `interval`. This module decides for all of them: blocks with fused passes
recompute their norms and activations themselves, the others are wrapped in torch's checkpoint.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.model.fused.dispatch import fits
from armillary.model.transformer import Transformer
from armillary.parallel.local_tensors import swap_class

_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "grouped_linear", "fp8_linear")
_SAVED = ("attention", "reduce_scatter", "all_reduce", "all_to_all")


def recompute(model: Transformer, *, kind: str, interval: int = 1) -> None:
    """Recompute the first of each `interval` layers; called after kernels are selected, before compiling."""
    random = any(getattr(module, "dropout", 0.0) for module in model.modules())
    fused: dict[int, Any] = {}  # one object for all blocks that share one
    for name in recomputed_blocks(model, kind=kind, interval=interval):
        block: Any = model.blocks[name]
        if kind == "selective" and block.fused is not None and fits(block):
            block.fused = fused.setdefault(id(block.fused), replace(block.fused, recompute=True))
        else:
            swap_class(block, _recomputing, kind, random)


def recomputed_blocks(model: Transformer, *, kind: str, interval: int = 1) -> list[str]:
    """Names of the blocks whose activations are recomputed."""
    return [] if kind == "none" else list(model.blocks)[::interval]


@cache
def _recomputing(kind: type[nn.Module], mode: str, random: bool) -> type[nn.Module]:
    """One subclass per class of block, so that layers share compiled code. A timer sets a block's `watched`, which is
    called in place of `plain` in both passes."""
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, save_policy)

    def forward(block: Any, *args: Any) -> Any:
        return checkpoint(block.watched or kind.forward, block, *args, **settings)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "plain": kind.forward, "watched": None})


def save_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Which results selective recompute saves."""
    name = op.name().split("::")[-1].split(".")[0] if isinstance(op, torch._ops.OpOverload) else str(op)
    saved = (name in _GEMMS and not _is_added(name, args)) or any(part in name for part in _SAVED)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_added(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a GEMM is added to another, whose result is saved: an adapter's second GEMM, which is small and cheap."""
    return name == "addmm" and args[0].dim() == 2
