"""What an attention kernel is told of its mask: flags, runs of documents, lists of the blocks a sparse mask allows.

Everything is found on the device, so nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import BLOCK
from armillary.kernels.attention.document_runs_triton import Runs, document_runs

# T queries, S keys, X and Y blocks of queries and keys


@dataclass(frozen=True)
class Lists:
    """Blocks to visit, those first that are allowed, and how many they are."""

    by_query: tuple[Tensor, Tensor]
    by_key: tuple[Tensor, Tensor]


def boil_down(
    documents: Tensor | None,
    blocks: Tensor | None,
    window: int,
    softcap: float,
    causal: bool,
    slopes: Tensor | None,
    T: int,
    S: int,
    step: int,
) -> tuple[dict[str, Any], Runs, Lists | None]:
    """The kernels' flags, and what they skip by; `step` is how many tokens a kernel goes along a list at a time."""
    flags = {
        "CAUSAL": causal,
        "WINDOW": 0 < window < S,
        "DOCS": documents is not None,
        "SLOPES": slopes is not None,
        "CAPPED": softcap != 0.0,
        "LISTED": 0 if blocks is None else BLOCK // step,
    }
    runs = Runs() if documents is None else document_runs(documents)
    return flags, runs, None if blocks is None else _lists(blocks, causal, T, S)


def _lists(blocks_XY: Tensor, causal: bool, T: int, S: int) -> Lists:
    blocks = blocks_XY.bool()
    if causal:  # blocks that lie wholly ahead are left out
        last = (torch.arange(blocks.shape[0], device=blocks.device) + 1) * BLOCK - 1 + S - T
        blocks = blocks & (torch.arange(blocks.shape[1], device=blocks.device) * BLOCK <= last[:, None])
    return Lists(_list(blocks), _list(blocks.t()))


def _list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return order.int().contiguous(), blocks.sum(1).int()
