"""What a person is told of a recipe before training starts: what a rule settled, and what is not done."""

from __future__ import annotations

from collections.abc import Iterator

from armillary.spec.fp8 import fp8_rule
from armillary.spec.layout import Layout
from armillary.spec.lora import frozen_experts
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob


def notes_of(config: ModelConfig, layout: Layout, job: TrainJob) -> Iterator[str]:
    """What was settled by a rule, and what a recipe asks for that does not stop training but is not done."""
    if layout.precision == "fp8":
        yield fp8_rule(config, layout, job)
    if job.lora_rank and (layers := frozen_experts(config, job.lora_on)):
        yield f"the experts of {layers} layers carry no adapters and stay as they are"
