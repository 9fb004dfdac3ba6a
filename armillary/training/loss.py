"""Next-token cross entropy from hidden states, a chunk of tokens at a time so that logits never all exist at once.

Each chunk's logits are recomputed in the backward pass; the sum is the same as in one piece.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from armillary.model.dtype import widen
from armillary.model.transformer import Transformer
from armillary.training.data.batches import IGNORED

# M tokens (batch and time flattened), H hidden


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


def _sum(model: Transformer, hidden_MH: Tensor, targets_M: Tensor) -> Tensor:
    return F.cross_entropy(widen(model.head(hidden_MH)), targets_M, ignore_index=IGNORED, reduction="sum")
