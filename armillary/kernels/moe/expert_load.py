"""Counters of how many tokens each expert of a layer was chosen for, on the device: nothing waits for the host."""

from typing import NamedTuple

import torch
from torch import Tensor

# M tokens, E experts, k experts per token


class ExpertLoad(NamedTuple):
    """Of one layer."""

    counts_E: Tensor  # int64, only ever added to
    num_live: Tensor  # int32 [1]: tokens from this one on are padding, and not counted


def count_choices(load: ExpertLoad, experts_Mk: Tensor) -> None:
    """Add the choices of the tokens that are no padding."""
    is_live_M = torch.arange(len(experts_Mk), device=experts_Mk.device) < load.num_live
    added_Mk = is_live_M[:, None].expand_as(experts_Mk).to(load.counts_E.dtype)
    load.counts_E.scatter_add_(0, experts_Mk.flatten().long(), added_Mk.flatten())
