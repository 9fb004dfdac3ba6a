"""A stage of layers among the stages with the same shard: hidden states go from each to the next.

They are sent and received outside the computation of a step, which is captured in a CUDA graph. Each stage works on
another step: one that has sent its hidden states goes on at once, and they are kept until the next stage has them.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# T tokens, M tokens of the largest step, H hidden


class Pipeline:
    """One stage."""

    def __init__(self, stage: int, ranks: tuple[int, ...]) -> None:
        """`ranks` of the world, by stage."""
        self.stage, self.ranks = stage, ranks
        self._received_MH: Tensor | None = None  # at one place in memory, for CUDA graphs
        self._sending: deque[tuple[Any, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1

    def allocate(self, max_tokens: int, hidden: int, weight: Tensor) -> None:
        """Memory for what the stage before sends, in the dtype and on the device of a weight."""
        if not self.is_first:
            self._received_MH = torch.zeros(max_tokens, hidden, dtype=weight.dtype, device=weight.device)

    def received(self, num_tokens: int) -> Tensor:
        """[T, H]: the last that came."""
        assert self._received_MH is not None, "the first stage receives nothing"
        return self._received_MH[:num_tokens]

    def receive(self, num_tokens: int) -> None:
        """From the stage before."""
        if not self.is_first:
            dist.recv(self.received(num_tokens), src=self.ranks[self.stage - 1])

    def send(self, hidden_TH: Tensor) -> None:
        """To the next stage. At most as many are on their way as there are stages, since no more steps are in
        flight."""
        while len(self._sending) >= len(self.ranks):
            self._sending.popleft()[0].wait()
        hidden_TH = hidden_TH.clone()  # a graph's result is overwritten by the next step
        self._sending.append((dist.isend(hidden_TH, dst=self.ranks[self.stage + 1]), hidden_TH))
