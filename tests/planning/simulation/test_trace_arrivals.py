"""The requests of a simulation are those that a load test would send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.planning.simulation.replayed_requests import Prompts
from armillary.planning.simulation.trace_arrivals import arrivals_of, has_shared_prefixes
from armillary.serving.load.schedule import planned_requests
from armillary.spec.tables.traffic import Load, Traffic


def test_they_are_those_of_armillary_load() -> None:
    traffic, load = Traffic(requests_per_s=5, duration_s=20), Load(length_spread=0.5, ramp_to=10)
    sent = planned_requests(traffic, load, seed=traffic.seed)
    simulated = arrivals_of(traffic, load)
    assert [(each.at_s, each.tokens_in, each.tokens_out) for each in simulated] == [
        (each.at_s, each.tokens_in, each.tokens_out) for each in sent
    ]
    assert not has_shared_prefixes(simulated)


def test_mooncake_blocks_become_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 4]},
        {"timestamp": 2000, "input_length": 900, "output_length": 4, "hash_ids": [5, 6]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 4, "hash_ids": [1, 2, 4]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arrivals = arrivals_of(Traffic(duration_s=10), Load(trace=str(file), warmup_s=0))
    assert [(each.shared_prefix, each.prefix_source) for each in arrivals] == [(0, 0), (1024, 1), (0, 0), (1536, 2)]
    prompts = Prompts(arrivals)
    texts = [prompts.of(each) for each in arrivals]
    assert texts[1][:1024] == texts[0][:1024] and texts[1][1024:] != texts[0][1024:1100]
    assert texts[3][:1100] == texts[1] and [len(text) for text in texts] == [1200, 1100, 900, 1536]


def test_the_second_stream_shares_no_prefix() -> None:
    traffic = Traffic(requests_per_s=5, duration_s=20, tokens_in=200, shared_prefix=100, long_requests_per_s=3)
    arrivals = arrivals_of(traffic, Load())
    first = next(each.number for each in arrivals if not each.is_long)
    assert {(each.shared_prefix, each.prefix_source) for each in arrivals if each.is_long} == {(0, 0)}
    assert {(each.shared_prefix, each.prefix_source) for each in arrivals if not each.is_long} == {(0, 0), (100, first)}


def test_prefixes_of_the_traffic_are_shared() -> None:
    traffic = Traffic(requests_per_s=5, duration_s=20, tokens_in=200, shared_prefix=100)
    arrivals = arrivals_of(traffic, Load(prefixes=3))
    prompts = Prompts(arrivals)
    assert len({tuple(prompts.of(each)[:100]) for each in arrivals}) == 3


def test_closed_loops_are_for_load_tests() -> None:
    with pytest.raises(BadInput, match="armillary load"):
        arrivals_of(Traffic(), Load(concurrency=4))
