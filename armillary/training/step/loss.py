"""Next-token cross entropy from hidden states, a chunk of tokens at a time so that logits never all exist at once.

`loss_sum` is the plain form: each chunk's logits are recomputed in the backward pass, the sum is the same as in one
piece. `through` makes one of a kernel that computes head and loss together.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.kernels.core.dtype import widen
from armillary.model.fused.dispatch import untouched
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.transformer import Transformer
from armillary.training.data.batch import IGNORED

# M tokens (batch and time flattened), H hidden


class LossSum(Protocol):
    """Sum of the losses of all targets that count; logits of about `chunk` tokens exist at once (0: all)."""

    def __call__(self, model: Transformer, hidden_BTH: Tensor, targets_BT: Tensor, *, chunk: int) -> Tensor: ...


def loss_sum(model: Transformer, hidden_BTH: Tensor, targets_BT: Tensor, *, chunk: int) -> Tensor:
    """Sum of the losses of all targets that count; `chunk` 0 takes all tokens at once."""
    hidden_MH, targets_M = hidden_BTH.flatten(0, 1), targets_BT.flatten()
    if not chunk or len(targets_M) <= chunk:
        return _sum(model, hidden_MH, targets_M)
    total = hidden_MH.new_zeros((), dtype=torch.float32)
    for hidden_mH, targets_m in zip(hidden_MH.split(chunk), targets_M.split(chunk), strict=True):
        if torch.is_grad_enabled():
            part = checkpoint(_sum, model, hidden_mH, targets_m, use_reentrant=False, preserve_rng_state=False)
        else:
            part = _sum(model, hidden_mH, targets_m)
        total = total + part
    return total


def through(linear_loss: Callable[..., Tensor], weights_16bit: Weights16Bit | None = None) -> LossSum:
    """`loss_sum` by a version of `kernels.linear_cross_entropy`, which bounds its memory by itself; heads that are
    wrapped, sharded or have a bias take the plain form."""

    def loss(model: Transformer, hidden_BTH: Tensor, targets_BT: Tensor, *, chunk: int) -> Tensor:
        head = model.embedding if model.output is None else model.output
        if not (untouched(head, nn.Linear) or untouched(head, nn.Embedding)) or getattr(head, "bias", None) is not None:
            return loss_sum(model, hidden_BTH, targets_BT, chunk=chunk)
        assert head is not None
        weight = head.weight if weights_16bit is None else weights_16bit(head.weight)
        config, hidden_MH = model.config, hidden_BTH.flatten(0, 1).to(weight.dtype)
        total: Tensor = linear_loss(
            hidden_MH, weight, targets_BT.flatten(), IGNORED, "sum", config.logit_softcap or 0.0, config.logit_scale
        )
        return total

    return loss


def _sum(model: Transformer, hidden_MH: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(widen(model.head(hidden_MH)), targets_M, ignore_index=IGNORED, reduction="sum")
