"""What a layout is checked against: a model, and what is known of devices, sequence and batch."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.spec.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a layout is checked against."""

    model: ModelConfig
    """what is cut"""
    num_devices: int | None = None
    """devices there are; None: not known yet"""
    sequence: int | None = None
    """tokens of a training sequence"""
    batch_tokens: int | None = None
    """tokens of a step"""
    for_training: bool = True
    """serving replicates KV heads where tp exceeds them, and has no batch to divide"""
    by_trainer: bool = False
    """our trainer runs it: experts lie over dp × cp only, a step has whole rounds of micro-batches, and selective
    recomputation goes with neither activations elsewhere nor backward passes in halves"""
