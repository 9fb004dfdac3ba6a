"""Retention: which checkpoints a run keeps. Pure functions over what is there.

Kept are the newest, every K-th step, the best by validation loss, and named milestones, together with the full
checkpoints that kept deltas need. The newest complete one always stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from armillary.spec.tables.train import TrainJob


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to keep; a number of 0 switches a rule off, but for `last`, where it keeps all."""

    last: int = 3
    interval: int = 0  # steps
    best: int = 0
    milestones: Mapping[str, int] = field(default_factory=dict)  # name -> step

    @classmethod
    def of(cls, job: TrainJob) -> "Policy":
        return cls(last=job.keep, interval=job.keep_every, best=job.keep_best, milestones=job.milestones)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint of a run."""

    step: int
    complete: bool = True
    val_loss: float | None = None
    base: int | None = None  # step of the full checkpoint that a delta needs


def removable(entries: Sequence[Entry], policy: Policy, *, newest: int | None = None) -> list[int]:
    """Steps to delete, in order. `newest` is the step that was just written: later ones, which a run resumed from
    further back will overwrite, are left alone, and nothing is deleted unless that one is complete."""
    known = sorted(entries, key=lambda entry: entry.step)
    now = max((entry.step for entry in known), default=0) if newest is None else newest
    past = [entry for entry in known if entry.step <= now]
    complete = [entry for entry in past if entry.complete]
    if not policy.last or not complete or (newest is not None and complete[-1].step != newest):
        return []
    stay = reasons(complete, policy)
    return [entry.step for entry in past if entry.step not in stay]


def reasons(complete: Sequence[Entry], policy: Policy) -> dict[int, str]:
    """Step -> why it stays, of complete checkpoints in order."""
    stay: dict[int, str] = {}
    for entry in complete[-policy.last :] if policy.last else complete:
        stay[entry.step] = "last"
    judged = [entry for entry in complete if entry.val_loss is not None]
    for entry in sorted(judged, key=lambda entry: entry.val_loss or 0.0)[: policy.best]:
        stay[entry.step] = "best"
    for entry in complete:
        if policy.interval and entry.step % policy.interval == 0:
            stay[entry.step] = f"every {policy.interval}"
    names = {step: name for name, step in policy.milestones.items()}
    stay |= {entry.step: names[entry.step] for entry in complete if entry.step in names}
    bases = {entry.step: entry.base for entry in complete if entry.base is not None}
    for step in list(stay):
        while (base := bases.get(step)) is not None and base not in stay:
            stay[base] = f"base of {step}"
            step = base
    return stay
