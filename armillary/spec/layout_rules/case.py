"""Case: what a layout is checked against: a model, and what is known of devices, sequence and batch."""

from dataclasses import dataclass, replace

from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a layout is checked against."""

    model: ModelConfig
    num_devices: int | None = None
    fills: int | None = None
    """requested devices (--devices): all are used, with the dp that fills them"""
    sequence: int | None = None
    batch_tokens: int | None = None
    for_training: bool = True
    """serving replicates KV heads where tp exceeds them, and has no batch to divide"""
    by_trainer: bool = False
    """our trainer runs it: experts are over dp × cp only, a step has full rounds of micro-batches, and selective
    recompute combines neither with offloaded activations nor with split backward passes, nor do those with zero=3"""
    compiled: bool = False

    def filled(self, layout: Layout) -> Layout:
        """With the dp that uses all requested devices, where one does."""
        inner = layout.num_devices // layout.dp
        return layout if self.fills is None or self.fills % inner else replace(layout, dp=self.fills // inner)
