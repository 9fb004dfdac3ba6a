"""What the trainer can do today; the rest is refused before anything starts, with what to set instead."""

from __future__ import annotations

from collections.abc import Iterator

from armillary.errors import BadLayout, BadRecipe
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe


def refuse_unsupported(recipe: Recipe) -> None:
    layout = recipe.layout
    if not recipe.hardware.is_here:
        raise BadRecipe("the trainer runs on this machine only; try --set hardware.on=here")
    if layout.num_devices > 1:
        axes = [name for name in ("dp", "tp", "pp", "cp") if getattr(layout, name) > 1]
        shown = " × ".join(f"{name}={getattr(layout, name)}" for name in axes)
        changes = " ".join(f"--set layout.{name}=1" for name in axes)
        raise BadLayout(f"the trainer uses one device and {shown} needs {layout.num_devices}; try {changes}")
    wanted = {"zero": 0, "recompute": "none", "offload": "none", "ep": 1}
    for name, value in wanted.items():
        if getattr(layout, name) != value:
            given = getattr(layout, name)
            raise BadLayout(f"the trainer cannot do layout.{name}={given} yet; try --set layout.{name}={value}")
    if layout.precision not in ("fp32", "tf32", "bf16"):
        raise BadLayout(f"the trainer cannot do {layout.precision} yet; try --set layout.precision=bf16")
    if recipe.train.save_every:
        raise BadRecipe("the trainer saves at the end and on Ctrl-C only; try --set train.save_every=0")
    if recipe.data.workers:
        raise BadRecipe("the trainer reads data in its own process; try --set data.workers=0")


def unsupported_notes(config: ModelConfig) -> Iterator[str]:
    """What a model asks for that does not stop training but is not done."""
    if config.moe is not None and config.moe.aux_loss:
        yield f"the balance loss of the router (model.moe.aux_loss={config.moe.aux_loss}) is not trained with yet"
