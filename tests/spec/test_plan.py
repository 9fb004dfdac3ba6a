"""Plans are read back exactly as they were written, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput, NotFound
from armillary.spec.gauges import GAUGES
from armillary.spec.hardware import Chip, Cluster, Link, Tier
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig, MoE, Rope
from armillary.spec.plan import VERSION, Plan
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.train import TrainJob

CHIP = Chip(name="c", title="C", vendor="v", kind="gpu", memory_bytes=80e9, flops={"bf16": 989.4e12, "fp8": 1979e12})
LINK = Link(name="l", title="L", bytes_per_s=450e9, latency_s=1e-6, kind="scale_up")
FACTORS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
MODEL = ModelConfig(
    name="m",
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=512,
    context=1024,
    norm_eps=1e-6,
    layers=(LayerKind(), LayerKind(mlp="moe", rope=False)),
    moe=MoE(num_experts=8, top_k=2, ffn=32),
    rope=Rope(scaling="longrope", original_context=16, short_factors=FACTORS, long_factors=FACTORS),
)


def plan(**changes: Any) -> Plan:
    base: dict[str, Any] = {
        "created": "2026-11-15T09:30:00Z",
        "recipe": {"model": {"name": "m"}, "layout": {"dp": 2}},
        "model": MODEL,
        "cluster": Cluster(name="c x 8", chip=CHIP, tiers=(Tier(link=LINK, count=8, oversubscription=2.0),)),
        "layout": Layout(dp=2, zero=3),
        "train": TrainJob(lr=3e-4),
        "notes": ("a", "", "b"),
        "predicted": {"step_s": 1.37, "memory_peak_bytes": 1.14e9},
    }
    return Plan(**(base | changes))


def test_there_and_back() -> None:
    for one in (plan(), plan(train=None, serve=Serve(), predicted={})):
        assert Plan.from_json(one.to_json()) == one


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GAUGES)), st.floats(allow_nan=False, allow_infinity=False)))
def test_predictions_survive_to_the_last_bit(predicted: dict[str, float]) -> None:
    assert Plan.from_json(plan(predicted=predicted).to_json()).predicted == predicted


def test_only_gauges_can_be_predicted() -> None:
    with pytest.raises(NotFound, match=r"no gauge 'step_time'; .*docs/gauges\.md"):
        plan(predicted={"step_time": 1.0})
    with pytest.raises(NotFound, match=r"did you mean step_s\?"):
        plan(predicted={"steps_s": 1.0})
    with pytest.raises(BadInput, match="is not a number"):
        plan(predicted={"step_s": float("inf")})


def test_a_newer_plan_is_refused() -> None:
    newer = json.loads(plan().to_json()) | {"version": VERSION + 1}
    with pytest.raises(BadInput, match=r"runs/x/plan\.json has version 2 .*; upgrade armillary"):
        Plan.from_dict(newer, "runs/x/plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "1"}', '{"version": 0}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="make a new plan"):
        Plan.from_json(text)


def test_an_unknown_or_missing_key_is_named() -> None:
    values = json.loads(plan().to_json())
    with pytest.raises(BadInput, match=r"unknown key 'modle' in plan\.json; did you mean model\?"):
        Plan.from_dict(values | {"modle": 1})
    del values["layout"]
    with pytest.raises(BadInput, match="lacks layout"):
        Plan.from_dict(values)


def test_a_changed_plan_is_another_plan() -> None:
    assert replace(plan(), layout=Layout(dp=4)) != plan()
