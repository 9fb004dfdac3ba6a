"""What the trainer can do today; the rest is refused before anything starts, with what to set instead."""

from __future__ import annotations

from collections.abc import Iterator

from armillary.errors import BadLayout
from armillary.spec.job import TrainJob
from armillary.spec.lora import frozen_experts
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe

NOT_YET = {"pp": 1, "cp": 1, "ep": 1, "offload": "none"}
"""field of the layout -> the value the trainer knows"""


def refuse_unsupported(recipe: Recipe) -> None:
    layout = recipe.layout
    for name, value in NOT_YET.items():
        given = getattr(layout, name)
        if given != value:
            raise BadLayout(f"the trainer cannot do layout.{name}={given} yet; try --set layout.{name}={value}")
    if layout.precision == "fp8":
        raise BadLayout("the trainer cannot do fp8 yet; try --set layout.precision=bf16")


def unsupported_notes(config: ModelConfig, job: TrainJob) -> Iterator[str]:
    """What a recipe asks for that does not stop training but is not done."""
    if job.lora_rank and (layers := frozen_experts(config, job.lora_on)):
        yield f"the experts of {layers} layers carry no adapters and stay as they are"
    if config.moe is not None and config.moe.aux_loss:
        yield f"the balance loss of the router (model.moe.aux_loss={config.moe.aux_loss}) is not trained with yet"
