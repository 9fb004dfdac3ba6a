"""What a checkpoint has of a trainer: tensors under names that do not depend on the layout, so that a run can resume on
any layout, and its counters.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from armillary.errors import BadData
from armillary.spec.plan import Plan
from armillary.training.data.shard_index import NAME as INDEX
from armillary.training.step.optimizer import states_by_name, weights_by_name
from armillary.training.trainer import Trainer


def tensors_of(trainer: Trainer) -> dict[str, Any]:
    """Trained tensors and optimizer states."""
    model, optimizer, called = trainer.model, trainer.optimizer, trainer.sharded.full_name
    trained = {f"model.{name}": value for name, value in weights_by_name(model, optimizer, called).items()}
    buffers = dict(model.named_buffers())
    trained |= {f"model.{name}": value for name, value in model.state_dict().items() if name in buffers}
    states = states_by_name(model, optimizer, called)
    return trained | {f"optimizer.{name}": value for name, value in states.items()}


def facts_of(trainer: Trainer, *, loss: float, restarts: int) -> dict[str, Any]:
    """Counters and what else is no tensor."""
    return {
        "tokens_total": trainer.tokens,
        "skipped_steps_total": trainer.nonfinite.skipped,
        "loss": loss,
        "val_loss": trainer.val_loss,
        "restarts_total": restarts,
        "layout": trainer.layout.text(),
        "scaler": trainer.scaler.state_dict(),
        "base": trainer.plan.weights,
        "kernels": trainer.choices.names,
        "text": text_mark(trainer.plan),
        "spikes": trainer.spikes.state(),
        "left_out_batches": sorted(trainer.batches.left_out),
    }


def restore_facts(trainer: Trainer, about: Mapping[str, Any]) -> None:
    trainer.tokens, trainer.nonfinite.skipped = int(about["tokens_total"]), int(about["skipped_steps_total"])
    trainer.val_loss = about["val_loss"]
    if trainer.scaler.is_enabled() and about["scaler"]:
        trainer.scaler.load_state_dict(about["scaler"])
    trainer.spikes.load(about.get("spikes", {}))
    trainer.batches.left_out = set(about.get("left_out_batches", ()))


def check_text(plan: Plan, about: Mapping[str, Any], *, run: str) -> None:
    """The order of samples is a function of the step only while the text is the same."""
    if about.get("text") not in (None, "", text_mark(plan)):
        raise BadData(
            f"the text has changed since run {run} was saved at step {about['step']}; put it back, or begin a new run "
            "with --run NAME"
        )


def text_mark(plan: Plan) -> str:
    """A short mark of the shards a run reads, from their checksums; empty where they are not on local disks."""
    assert plan.data is not None
    indices = [Path(folder) / INDEX for folder in plan.data.paths or (plan.data.path,)]
    if not all(path.is_file() for path in indices):
        return ""
    sums = [checksum for path in indices for checksum in re.findall(r'"sha256": ?"([0-9a-f]+)"', path.read_text())]
    return blake2b("".join(sums).encode(), digest_size=8).hexdigest()
