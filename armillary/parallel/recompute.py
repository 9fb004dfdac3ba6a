"""Activation recompute: what the backward pass makes again instead of keeping (Chen et al. 2016).

`full` keeps a layer's input only; `selective` keeps the results of matrix products, attention and exchanges between
ranks, and makes the cheap rest again; either on one layer in `every`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.model.fused.dispatch import fits
from armillary.model.transformer import Transformer
from armillary.parallel.local_tensors import become

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "grouped_linear", "fp8_linear")
_PARTS = ("attention", "reduce_scatter", "all_reduce", "all_to_all")


def recompute(model: Transformer, *, kind: str, every: int = 1) -> None:
    """Recompute the first of each `every` layers; call it before compiling and sharding."""
    if kind == "none":
        return
    random = any(getattr(module, "dropout", 0.0) for module in model.modules())
    for name in recomputed(model, kind=kind, every=every):
        block = model.blocks[name]
        if kind == "full" or not _recomputes_itself(block):
            become(block, _recomputing, kind, random)


def recomputed(model: Transformer, *, kind: str, every: int = 1) -> list[str]:
    """Names of the blocks that are."""
    return [] if kind == "none" else list(model.blocks)[::every]


def _recomputes_itself(block: Any) -> bool:
    """Hand-written passes that make norms and activations again need no help."""
    return block.fused is not None and block.fused.recompute and fits(block)


@cache
def _recomputing(kind: type[nn.Module], how: str, random: bool) -> type[nn.Module]:
    """One subclass a kind of block: compiled code is shared between layers. Whoever times it sets a block's `watched`,
    which is called in place of `plain`, both times."""
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if how == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, keep)

    def forward(block: Any, *args: Any) -> Any:
        return checkpoint(block.watched or kind.forward, block, *args, **settings)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "plain": kind.forward, "watched": None})


def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Which results selective recompute keeps."""
    name = op.name().split("::")[-1].split(".")[0] if isinstance(op, torch._ops.OpOverload) else str(op)
    kept = (name in _PRODUCTS and not _is_added(name, args)) or any(part in name for part in _PARTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_added(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a product is added to another, which is kept: an adapter's second, over few numbers and so cheap."""
    return name == "addmm" and args[0].dim() == 2
