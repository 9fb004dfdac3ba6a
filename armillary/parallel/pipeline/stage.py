"""The layers of one pipeline rank, and the virtual stages of it that micro-batches pass through.

A rank's virtual stages share one Transformer, `StageModel`, under the names of the full model: sharding, recompute,
compilation, initialization and checkpoints see that one. A virtual stage is a view of some of its layers.
"""

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
"""the tied embedding on the first stage and its copy on the last; the full model has the first"""
Attends = Callable[[Tensor | None], Attend]
"""the attention of a micro-batch, from its documents"""


class StageModel(Transformer):
    """All layers of one stage, which need not be adjacent."""

    def __init__(self, config: ModelConfig, spans: tuple[Span, ...]) -> None:
        layers: Any = [layer for span in spans for layer in span.layers]
        super().__init__(config, layers=layers, first=spans[0].first, last=spans[-1].last)
        self.spans = spans

    @property
    def has_copy(self) -> bool:
        """Whether its output projection is a copy of another stage's embedding."""
        return self.config.tied and self.output is not None and self.embedding is None


def make_stage_model(config: ModelConfig, layout: Layout, stage: int, *, sequence: int) -> StageModel:
    """The layers of a stage of the layout, on the current default device."""
    spans = split(config, layout.pp, layout.interleave, sequence=sequence)
    return StageModel(config, chunks_of(spans, stage, layout.pp))


class Received(torch.autograd.Function):
    """Hidden states from another stage; their gradient is sent back there, so it is made contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class VirtualStage(Transformer):
    """A view of some layers of a stage; micro-batches carry positions and documents with them."""

    def __init__(self, model: StageModel, span: Span) -> None:
        nn.Module.__init__(self)
        self.config, self.residual_dtype, self.span = model.config, model.residual_dtype, span
        self.rotary = model.rotary
        self.embedding = model.embedding if span.first else None
        self.position_embedding = model.position_embedding if span.first else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in span.layers})
        self.norm = model.norm if span.last else None
        self.output = model.output if span.last else None
        self.wire = torch.float32
        self.attends: Attends | None = None
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """`attends` gives the attention for these documents; hidden states are sent on in the dtype `wire`."""
        assert self.attends is not None, "a pipeline's step hands it in"
        with self.autocast():
            x = x if self.span.first else Received.apply(x)
            hidden = super().forward(x, positions_BT, self.attends(documents_BT))
        return hidden if self.span.last else hidden.to(self.wire).contiguous()
