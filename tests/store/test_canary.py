"""Golden values compared: bits, rounding, and what has changed since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import NotFound
from armillary.store.canary import CanaryRecord, CanaryStep, compare, golden_path, read_golden, write_golden

STEPS = tuple(CanaryStep(loss=5.0 - number, grad_norm=1.0, batch_checksum=100.0 + number) for number in range(3))
GOLDEN = CanaryRecord(
    created="2026-11-18T00:00:00Z",
    recipe={"train": {"seed": 0}},
    precision="fp32",
    steps=STEPS,
    weights="a1",
    code={"source": "c0"},
    versions={"torch": "2.11"},
    device={"device": "H100"},
)
NEWER = {"versions": {"torch": "2.13"}}


def changed(step: int, **values: float) -> tuple[CanaryStep, ...]:
    return tuple(replace(each, **values) if number == step else each for number, each in enumerate(STEPS))


@pytest.mark.parametrize(
    ("changes", "agreement", "says"),
    [
        ({}, "equal", "all bits of 3 steps are equal"),
        (NEWER, "equal", "all bits"),
        ({"weights": "b2"}, "different", "bits differ in the weights only with the same code, versions and device"),
        ({"steps": changed(1, loss=4.0001)}, "different", "bits differ from step 1 on with the same code"),
        (NEWER | {"weights": "b2", "steps": changed(1, loss=4.0001)}, "close", "losses by 2.5e-05 at most"),
        (NEWER | {"steps": changed(1, loss=4.01)}, "different", "loss 4.01 at step 1, golden 4: 2.5e-03 apart"),
        (NEWER | {"steps": changed(1, loss=4.01), "precision": "bf16"}, "close", "rounding of other versions"),
        (NEWER | {"steps": changed(2, grad_norm=1.1)}, "different", "grad_norm 1.1 at step 2"),
        (NEWER | {"steps": changed(2, loss=float("nan"))}, "different", "loss nan at step 2"),
        (NEWER | {"steps": changed(0, batch_checksum=7.0)}, "different", "step 0 has other samples"),
    ],
)
def test_agreement(changes: dict[str, Any], agreement: str, says: str) -> None:
    verdict = compare(GOLDEN, replace(GOLDEN, **changes))
    assert (verdict.agreement, verdict.holds) == (agreement, agreement != "different") and says in verdict.text


def test_what_has_changed_is_named() -> None:
    verdict = compare(GOLDEN, replace(GOLDEN, code={"source": "c1"}, device={"device": "H200", "threads": "4"}))
    assert verdict.changed == {
        "code": ("source c0 → c1",),
        "versions": (),
        "device": ("device H100 → H200", "threads none → 4"),
    }


def test_golden_values_are_kept_beside_the_recipe(tmp_path: Path) -> None:
    path = golden_path(tmp_path / "tour.toml")
    assert path.name == "tour.canary.json"
    with pytest.raises(NotFound, match=r"no golden values in .*; make them with --update"):
        read_golden(path)
    odd = replace(GOLDEN, steps=changed(0, loss=0.1 + 0.2))
    write_golden(path, odd)
    assert read_golden(path) == odd
