"""The part of a model that one pipeline rank holds, and the chunks of it that micro-batches pass through.

A rank's chunks share one Transformer, `Held`, under the names of the whole model: what cuts, recomputes, compiles,
fills and saves models sees that one. A chunk is a view of it, from hidden states to hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from armillary.model.layers.attention_forms import Attend
from armillary.model.transformer import Transformer
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.pipeline_split import Span, chunks_of, split
from armillary.spec.model import ModelConfig

TIED, COPY = "embedding.weight", "output.weight"
"""what two stages hold of a tied model, the first and the last; the whole model has the first"""
Attends = Callable[[Tensor | None], Attend]
"""the attention of a micro-batch, from its documents"""


class Held(Transformer):
    """All layers of one stage, which need not lie side by side."""

    def __init__(self, config: ModelConfig, spans: tuple[Span, ...]) -> None:
        layers: Any = [layer for span in spans for layer in span.layers]
        super().__init__(config, layers=layers, first=spans[0].first, last=spans[-1].last)
        self.spans = spans

    @property
    def has_copy(self) -> bool:
        """Whether its output projection is a copy of another stage's embedding."""
        return self.config.tied and self.output is not None and self.embedding is None


def hold(config: ModelConfig, layout: Layout, stage: int, *, sequence: int) -> Held:
    """What a stage of the layout holds, on the current default device."""
    spans = split(config, layout.pp, layout.interleave, sequence=sequence)
    return Held(config, chunks_of(spans, stage, layout.pp))


class Received(torch.autograd.Function):
    """Hidden states that came from another stage; their gradient goes back there, so it lies in one piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class Chunk(Transformer):
    """A view of some layers of a stage; micro-batches carry positions and documents with them."""

    def __init__(self, held: Held, span: Span) -> None:
        nn.Module.__init__(self)
        self.config, self.residual_dtype, self.span = held.config, held.residual_dtype, span
        self.rotary = held.rotary
        self.embedding = held.embedding if span.first else None
        self.position_embedding = held.position_embedding if span.first else None
        self.blocks = nn.ModuleDict({str(i): held.blocks[str(i)] for i in span.layers})
        self.norm = held.norm if span.last else None
        self.output = held.output if span.last else None
        self.wire = torch.float32
        self.attends: Attends | None = None
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """`attends` says how a micro-batch with these documents attends; what travels on has one format."""
        assert self.attends is not None, "a pipeline's step hands it in"
        with self.autocast():
            x = x if self.span.first else Received.apply(x)
            made = super().forward(x, positions_BT, self.attends(documents_BT))
        return made if self.span.last else made.to(self.wire).contiguous()
