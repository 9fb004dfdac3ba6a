"""What a layout is checked against: a model, and what is known of devices, sequence and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a layout is checked against."""

    model: ModelConfig
    """what is cut"""
    num_devices: int | None = None
    """devices there are; None: not known yet"""
    fills: int | None = None
    """devices that a person asked for (--devices): all are used, with as much dp as it takes"""
    sequence: int | None = None
    """tokens of a training sequence"""
    batch_tokens: int | None = None
    """tokens of a step"""
    for_training: bool = True
    """serving replicates KV heads where tp exceeds them, and has no batch to divide"""
    by_trainer: bool = False
    """our trainer runs it: experts lie over dp × cp only, a step has whole rounds of micro-batches, and selective
    recomputation goes with neither activations elsewhere nor backward passes in halves, which zero=3 does not either"""
    compiled: bool = False
    """blocks go through a compiler (train.compile), which backward passes in halves do not"""

    def filled(self, layout: Layout) -> Layout:
        """With the dp that uses all devices asked for, where some does."""
        inner = layout.num_devices // layout.dp
        return layout if self.fills is None or self.fills % inner else replace(layout, dp=self.fills // inner)
