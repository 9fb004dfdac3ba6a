"""Golden values of a recipe: what a short deterministic run gave, and with which code, versions and device.

They are in RECIPE.canary.json beside the recipe, to be kept with it. Rules of the comparison:

    samples differ                                         different: the data or its order has changed
    all bits equal                                         equal
    bits differ, same code, versions and device            different: not deterministic, or faulty hardware
    bits differ, and one of these has changed              close within TOLERANCE, else different
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from armillary.errors import NotFound
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json

TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}
"""relative difference of a loss that counts as rounding, by precision. fp32: 2e-4 was the largest within 390 steps in
which the number of ranks changed, 1e-6 within 20 (2026-11, 2 cores of an Intel Xeon, armillary-2m)"""
NORM_FACTOR = 10.0
"""gradient norms may differ by so many times as much"""
KINDS = ("code", "versions", "device")
Agreement = Literal["equal", "close", "different"]


@dataclass(frozen=True, kw_only=True)
class CanaryStep:
    """Values of one step."""

    loss: float
    grad_norm: float
    batch_checksum: float


@dataclass(frozen=True, kw_only=True)
class CanaryRecord:
    """What a short deterministic run gave."""

    created: str
    recipe: Mapping[str, Any]  # with overrides applied
    precision: str
    steps: tuple[CanaryStep, ...]
    weights: str  # checksum of the weights after the last step
    code: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, str] = field(default_factory=dict)  # with layout, precision and kernels


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict:
    """How a run compares with golden values, and what has changed since they were made."""

    agreement: Agreement
    text: str
    changed: Mapping[str, tuple[str, ...]]  # kind -> 'torch 2.11 → 2.13', …

    @property
    def holds(self) -> bool:
        return self.agreement != "different"


def golden_path(recipe: Path) -> Path:
    return recipe.with_suffix(".canary.json")


def read_golden(path: Path) -> CanaryRecord:
    if not path.is_file():
        raise NotFound(f"no golden values in {path}; make them with --update, on a machine that you trust")
    return build(CanaryRecord, nan_safe_json.read_table(path), str(path))


def write_golden(path: Path, record: CanaryRecord) -> None:
    write_json(path, to_plain(record))


def compare(golden: CanaryRecord, now: CanaryRecord) -> CanaryVerdict:
    """By the rules above."""
    changed = {kind: tuple(_changes(getattr(golden, kind), getattr(now, kind))) for kind in KINDS}
    since = ", ".join(kind for kind in KINDS if changed[kind])
    compared = list(enumerate(zip(golden.steps, now.steps, strict=True)))
    for step, (before, after) in compared:
        if before.batch_checksum != after.batch_checksum:
            text = f"step {step} has other samples than the golden run; restore the data, or accept it with --update"
            return CanaryVerdict(agreement="different", text=text, changed=changed)
    first = next((step for step, (before, after) in compared if before != after), None)
    if first is None and golden.weights == now.weights:
        return CanaryVerdict(agreement="equal", text=f"all bits of {len(compared)} steps are equal", changed=changed)
    where = f"from step {first} on" if first is not None else "in the weights only"
    if not since:
        text = f"bits differ {where} with the same code, versions and device; run it again, and test the hardware"
        return CanaryVerdict(agreement="different", text=text, changed=changed)
    limit = TOLERANCE.get(now.precision, TOLERANCE["bf16"])
    for step, (before, after) in compared:
        for name, most in (("loss", limit), ("grad_norm", NORM_FACTOR * limit)):
            off = _relative(getattr(before, name), getattr(after, name))
            if not off <= most:
                what = f"{name} {getattr(after, name):.6g} at step {step}, golden {getattr(before, name):.6g}"
                text = f"{what}: {off:.1e} apart, {most:.0e} is rounding; look at what has changed ({since})"
                return CanaryVerdict(agreement="different", text=text, changed=changed)
    worst = max(_relative(before.loss, after.loss) for _, (before, after) in compared)
    text = f"bits differ {where}, losses by {worst:.1e} at most: rounding of other {since}"
    return CanaryVerdict(agreement="close", text=text, changed=changed)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            yield f"{key} {before.get(key, 'none')} → {now.get(key, 'none')}"


def _relative(before: float, now: float) -> float:
    """nan where one is not a number."""
    return abs(now - before) / max(abs(before), 1e-12) if before != now else 0.0
