"""What the trainer can do today; the rest is refused before anything starts, with what to set instead."""

from __future__ import annotations

from collections.abc import Iterator

from armillary.errors import BadLayout
from armillary.parallel.pipeline_make import refuse_rounds, refuse_split
from armillary.spec.job import TrainJob
from armillary.spec.lora import frozen_experts
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe

NOT_YET = {"offload": "none"}
"""field of the layout -> the value the trainer knows"""


def refuse_unsupported(recipe: Recipe) -> None:
    layout = recipe.layout
    for name, value in NOT_YET.items():
        given = getattr(layout, name)
        if given != value:
            raise BadLayout(f"the trainer cannot do layout.{name}={given} yet; try --set layout.{name}={value}")
    if layout.precision == "fp8":
        raise BadLayout("the trainer cannot do fp8 yet; try --set layout.precision=bf16")
    _refuse_experts(recipe)
    refuse_split(layout, compile=recipe.train.compile)
    refuse_rounds(layout, recipe.train.batch_tokens, recipe.train.sequence)


def _refuse_experts(recipe: Recipe) -> None:
    layout = recipe.layout
    ranks = layout.dp * layout.cp
    if ranks % layout.ep:
        near = max(ep for ep in range(1, ranks + 1) if ranks % ep == 0 and ep < layout.ep)
        raise BadLayout(f"the trainer spreads experts over dp × cp = {ranks} ranks, which ep={layout.ep} does not "
                        f"divide; try --set layout.ep={near}")  # fmt: skip
    if layout.cp > 1 and recipe.train.expert_capacity is not None:
        raise BadLayout("places of experts are given out by whole sequences, which cp cuts; "
                        "try --set train.expert_capacity=none")  # fmt: skip


def unsupported_notes(config: ModelConfig, job: TrainJob) -> Iterator[str]:
    """What a recipe asks for that does not stop training but is not done."""
    if job.lora_rank and (layers := frozen_experts(config, job.lora_on)):
        yield f"the experts of {layers} layers carry no adapters and stay as they are"
