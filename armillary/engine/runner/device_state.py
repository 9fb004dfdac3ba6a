"""Device state between steps: each row's tokens, block table and sampling parameters, and the KV blocks.

A token that one step samples is written here and read by the next: the host only sends rows and positions.
"""

import math
from copy import copy

import numpy as np
import torch
from torch import Tensor

from armillary.engine.runner.host_blocks import HostBlocks
from armillary.engine.runner.recurrent_states import RecurrentStates
from armillary.engine.runner.step_input import Admitted, Ints, Step
from armillary.kernels.paged.paged_attention import by_heads
from armillary.spec.model import ModelConfig

# R rows of the batch and the null row, T tokens of the longest, G groups of layers, P blocks of the longest sequence

FLOATS = ("temperature", "min_p", "top_p", "repetition", "presence", "frequency")
INTS = ("seed", "top_k", "num_prompt")


def block_shape(config: ModelConfig, block_tokens: int, kv_heads: int | None = None) -> tuple[int, ...]:
    """Of one layer's part of a block: [keys and values, head, token, dim], of latents [token, dim]; `kv_heads` where a
    rank has not all of them."""
    if config.mla is not None:
        return block_tokens, config.mla.kv_rank + config.mla.rope_dim
    in_pairs = any(kind.attention == "2-simplicial" for kind in config.layers)
    return 2, (1 + in_pairs) * (kv_heads or config.kv_heads), block_tokens, config.head_dim


def with_heads(blocks: Tensor, heads: int) -> Tensor:
    """A layer's blocks [block, 2, heads, token, dim] where others of the model have more heads: within a block adjacent
    in memory, as kernels want it, or the first of the lists that `by_heads` makes."""
    if blocks.shape[2] == heads:
        return blocks
    if not blocks[0].is_contiguous():
        return blocks[:, :, :heads]
    shape = (2, heads, *blocks.shape[3:])
    return blocks.flatten(1)[:, : math.prod(shape)].unflatten(1, shape)


class DeviceRows:
    """Buffers that never move, so that CUDA graphs can be captured over them."""

    def __init__(
        self,
        *,
        max_running: int,
        max_model_len: int,
        pages: int,
        groups: int,
        blocks: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        states: RecurrentStates | None = None,
    ) -> None:
        self.device, self.states = device, states
        rows = max_running + 1
        self.tokens_RT = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.tables_GRP = torch.zeros(groups, rows, pages, dtype=torch.int32, device=device)
        self.floats_FR = torch.zeros(len(FLOATS), rows, device=device)
        self.floats_FR[2:4] = 1.0
        self.ints_IR = torch.zeros(len(INTS), rows, dtype=torch.int64, device=device)
        self.adapters_R = torch.full((rows,), -1, dtype=torch.int64, device=device)  # slots of LoRA adapters
        self._shape, self._dtype = blocks, dtype
        self.host: HostBlocks | None = None  # blocks that do not fit the device
        self.allocate(blocks[1])

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """Allocate or replace the KV blocks, [layer of a group, block, *block_shape], and those in host memory; only
        before a CUDA graph is captured over them."""
        shape, has_heads = self._shape, len(self._shape) == 6
        zeros = by_heads if self.device.type == "cpu" and has_heads else torch.zeros
        self.blocks: Tensor = zeros((shape[0], num_blocks, *shape[2:]), dtype=self._dtype, device=self.device)
        self.host = HostBlocks(host_blocks, self.blocks) if host_blocks else None

    def take(self, step: Step) -> None:
        """Apply a step's changes: new rows, table entries, block copies."""
        if step.admitted:
            self._admit(step.admitted)
        if step.table_updates.size:
            places, values = self.send(step.table_updates).unbind()
            self.tables_GRP.view(-1)[places.long()] = values
        if step.copies.size:
            self.copy_blocks(step.copies)
        for given in (step.known, step.drafts):
            if given is not None and (given[2] >= 0).all():
                rows, positions, tokens = self.send(given).unbind()
                self.tokens_RT[rows.long(), positions.long()] = tokens

    def copy_blocks(self, copies: Ints) -> None:
        if self.host is not None and copies.min() < 0:
            return self.host.copy(self.blocks, copies)
        sources, targets = self.send(copies).long().unbind()
        self.blocks[:, targets] = self.blocks[:, sources]

    def drafted(self, step: Step) -> Tensor:
        """The draft tokens of a step, before the step writes what it samples in their places."""
        rows, positions, _ = self.send(step.drafts).long().unbind()  # type: ignore[arg-type]
        return self.tokens_RT[rows, positions]

    def with_blocks(self, blocks: tuple[int, ...], dtype: torch.dtype) -> "DeviceRows":
        """The same rows and the first block table, with KV blocks for another model."""
        other = copy(self)
        other.tables_GRP = self.tables_GRP[:1]
        other._shape, other._dtype = blocks, dtype
        other.allocate(blocks[1])
        return other

    def _admit(self, admitted: list[Admitted]) -> None:
        rows = self._sent(torch.tensor([new.row for new in admitted]))
        self.floats_FR[:, rows] = self._sent(torch.tensor([new.floats for new in admitted]).T.contiguous())
        ints = torch.tensor([new.ints for new in admitted], dtype=torch.int64)
        self.ints_IR[:, rows] = self._sent(ints.T.contiguous())
        self.adapters_R[rows] = self._sent(torch.tensor([new.adapter for new in admitted]))
        sizes = [len(new.tokens) // 4 for new in admitted]
        flat = self._sent(torch.frombuffer(bytearray(b"".join(new.tokens for new in admitted)), dtype=torch.int32))
        for new, tokens in zip(admitted, flat.split(sizes), strict=True):
            self.tokens_RT[new.row, : len(tokens)] = tokens

    def send(self, numbers: np.ndarray) -> Tensor:  # type: ignore[type-arg]
        """Asynchronous copy to the device."""
        return self._sent(torch.from_numpy(np.ascontiguousarray(numbers)))

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
