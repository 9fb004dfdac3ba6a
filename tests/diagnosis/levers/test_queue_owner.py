"""Who owns a queue: a lever on this device, or servers that are missing."""

from __future__ import annotations

import pytest

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.levers.serving import assign_queue


def found(cause: Cause, share: float, speedup: float, devices: int = 1) -> Finding:
    lever = Lever(title=cause, speedup=speedup, of="tokens_out_per_s", devices=devices)
    return Finding(
        loop="product", cause=cause, rule=cause, says="", share=share, evidence=(), levers=(lever,) if speedup else ()
    )


def first(*findings: Finding) -> str:
    return max(assign_queue(list(findings)), key=lambda finding: finding.share).cause


@pytest.mark.parametrize(
    ("rows", "servers", "count", "owner"),
    [
        (1.4, 2.3, 3, "batch_too_small"),  # rows bring 0.4 for nothing, each server 0.65
        (1.4, 2.3, 2, "too_few_replicas"),  # one more server brings 1.3
        (1.1, 2.0, 2, "too_few_replicas"),
        (3.5, 3.6, 4, "batch_too_small"),
    ],
)
def test_a_lever_without_a_device_is_held_against_one_more_server(
    rows: float, servers: float, count: int, owner: str
) -> None:
    crowd = found("too_few_replicas", 0.9, servers, count)
    assert first(found("batch_too_small", 0.3, rows), crowd) == owner


def test_the_best_of_several_owns_it() -> None:
    crowd = found("too_few_replicas", 0.9, 2.0, 2)
    assert first(found("queueing", 0.5, 1.6), found("batch_too_small", 0.3, 1.9), crowd) == "batch_too_small"


def test_a_full_device_whose_lever_is_servers_owns_nothing() -> None:
    full = found("kv_pressure", 0.4, 2.0, devices=2)
    crowd = found("too_few_replicas", 0.9, 2.0, 2)
    assert first(full, crowd) == "too_few_replicas" and assign_queue([full]) == [full]
