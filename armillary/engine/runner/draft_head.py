"""Drafts from a model's own multi-token-prediction layer (`model.multi_token`), or a head like it that
`armillary train --draft-for` has trained.

The layer joins the hidden state of position p with the embedding of token p + 1 and gives, through the model's head,
token p + 2. The model's hidden states are kept in blocks beside its keys and values, under the same numbers: what is
shared, copied or freed is so for both, and the layer computes what it has missed when it first drafts for a sequence.
While it drafts, its own hidden states stand where the model's are to come; the step that verifies the tokens
overwrites them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from armillary.engine.runner.device_state import DeviceRows
from armillary.engine.runner.draft_model import DraftModel
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_input import Inputs, Ints, Shape
from armillary.model.multi_token import MtpLayer
from armillary.model.transformer import Transformer

# T tokens, B sequences, H hidden


class HiddenBlocks:
    """Normed hidden states of tokens, in blocks of the same numbers as the KV blocks."""

    def __init__(self, rows: DeviceRows, hidden: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.rows, self.block_tokens = rows.with_blocks((1, 2, block_tokens, hidden), dtype), block_tokens
        self.tables_RP = rows.tables_GRP[0]

    @property
    def block_bytes(self) -> int:
        return self.rows.blocks[:, 0].nbytes

    def write(self, slots_T: Tensor, hidden_TH: Tensor) -> None:
        """Padding, whose slots are −1, goes to the null block."""
        states = self.rows.blocks.flatten(0, 2)
        states.index_put_((slots_T.clamp_min(0),), hidden_TH.to(states.dtype))

    def read(self, slots_T: Tensor) -> Tensor:
        return self.rows.blocks.flatten(0, 2)[slots_T.clamp_min(0)]

    def write_next(self, inputs: Inputs, hidden_BH: Tensor) -> None:
        """One position after the last of each sequence; of those that do not sample, to the null block."""
        rows_B, ends_B = inputs.long("writes_B"), inputs.long("lengths_B")
        blocks_B = self.tables_RP[rows_B, ends_B // self.block_tokens].long()
        self.write(blocks_B * self.block_tokens + ends_B % self.block_tokens, hidden_BH)


class _HeadExecutor(FastExecutor):
    """Keeps the layer's hidden states for its next pass."""

    hidden: HiddenBlocks

    def _compute(self, shape: Shape, quick: bool, packed: Tensor) -> Tensor:
        inputs = self.forward.inputs(shape, packed)
        hidden_BH = self.forward.normed(self.forward.last(inputs))
        self.hidden.write_next(inputs, hidden_BH)
        return self.sampler.quick(self.forward.head(hidden_BH), inputs)


class DraftHead(DraftModel):
    """Runs the passes of a step's drafts through one layer on the model's hidden states."""

    lag = 1

    def __init__(self, target: FastExecutor, layer: MtpLayer, *, block_tokens: int, **options: Any) -> None:
        own = target.forward
        super().__init__(target, _as_model(layer, own.model), block_tokens=block_tokens, **options)
        rows, forward, config = self.executor.rows, self.executor.forward, own.model.config
        rows.tokens_RT = target.rows.tokens_RT[:, 1:]  # at position p the layer reads token p + 1
        self.executor.sampler.ahead = 1
        self.hidden = HiddenBlocks(target.rows, config.hidden, block_tokens, next(own.model.parameters()).dtype)
        assert isinstance(self.executor, _HeadExecutor)
        self.executor.hidden = self.hidden
        self.block_bytes += self.hidden.block_bytes
        forward.head = own.head

        def joined(inputs: Inputs, embedded_TH: Tensor) -> Tensor:
            hidden_TH = self.hidden.read(inputs.long("slots_GT"))
            return layer.joined(hidden_TH, embedded_TH)  # type: ignore[no-any-return]

        def keep(inputs: Inputs, x_TH: Tensor) -> None:
            slots_GT = inputs.long("slots_GT").view(inputs.shape.groups, -1)
            self.hidden.write(slots_GT[0], own.normed(x_TH))

        forward.entry, own.keep = joined, keep

    def make_executor(self, *given: Any, **options: Any) -> FastExecutor:
        return _HeadExecutor(*given, **options)

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        super().allocate(num_blocks, host_blocks)
        self.hidden.rows.allocate(num_blocks, host_blocks)

    def copy_blocks(self, copies: Ints) -> None:
        super().copy_blocks(copies)
        self.hidden.rows.copy_blocks(copies)


def _as_model(layer: MtpLayer, target: Transformer) -> Transformer:
    """The layer as a model of one layer, with the target's embedding, rotary tables and head."""
    config = replace(target.config, name=f"the draft head of {target.config.name}", layers=(target.config.mtp_kind,))
    with torch.device("meta"):
        model = Transformer(config)
    model.blocks["0"], model.norm = layer.block, layer.norm
    model.embedding, model.position_embedding = target.embedding, target.position_embedding
    model.rotary, model.output = target.rotary, target.output
    return model
