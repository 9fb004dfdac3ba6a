"""What the trainer can do today; the rest is refused before anything starts, with what to set instead."""

from __future__ import annotations

from armillary.errors import BadLayout, BadRecipe
from armillary.spec.plan import Plan


def refuse_unsupported(plan: Plan) -> None:
    layout = plan.layout
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
    if plan.train is None or plan.data is None:
        raise BadRecipe("this plan is not for training; plan it with --for train")
    if plan.train.save_every:
        raise BadRecipe("the trainer saves at the end and on Ctrl-C only; try --set train.save_every=0")
    if plan.data.workers:
        raise BadRecipe("the trainer reads data in its own process; try --set data.workers=0")
