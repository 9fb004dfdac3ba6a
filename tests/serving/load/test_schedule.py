"""Requests of a test as times and lengths, from [traffic] and from traces in both public formats."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, pstdev

import pytest

from armillary.errors import BadData, BadInput, NotFound
from armillary.serving.load.schedule import lengths, num_shortened, planned_requests, warmup_s
from armillary.serving.load.trace import read_trace
from armillary.spec.tables.traffic import Load, Traffic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.2224670,879,55
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
"""


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def test_an_azure_trace_is_read_in_the_order_of_its_times(azure: Path) -> None:
    rows = read_trace(azure)
    assert [row.tokens_in for row in rows] == [374, 879, 396]
    assert [row.at_s for row in rows] == pytest.approx([0, 3.541877, 4.314579], abs=1e-5)


def test_a_mooncake_trace_keeps_its_blocks(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    rows = read_trace(tmp_path / "m.jsonl")
    assert [(row.at_s, row.tokens_in, row.tokens_out, row.blocks) for row in rows] == [
        (0.0, 1300, 5, (0, 1, 2)),
        (0.5, 600, 7, (0, 9)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
        '{"timestamp": 1}\n',
        '{"timestamp": 0, "input_length": -5, "output_length": 1}\n',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(BadData, match="; "):
        read_trace(tmp_path / "t")


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="Azure CSV or a Mooncake JSONL"):
        read_trace(tmp_path / "gone.csv")


def test_a_replay_is_faster_and_shorter_where_asked(azure: Path) -> None:
    load = Load(trace=str(azure), trace_speed=2.0, longest=500, warmup_s=0)
    rows = planned_requests(Traffic(duration_s=2.0), load, seed=0)
    assert [row.at_s for row in rows] == pytest.approx([0, 1.7709385], abs=1e-5)  # the third comes after 2 s
    assert [row.tokens_in + row.tokens_out for row in rows] == [418, 500] and num_shortened(rows, load) == 1


def test_a_warm_up_that_eats_the_trace_is_refused(azure: Path) -> None:
    with pytest.raises(BadInput, match=r"load\.warmup_s=0"):
        planned_requests(Traffic(duration_s=60), Load(trace=str(azure)), seed=0)


def test_the_warm_up_runs_at_the_first_rate_and_comes_on_top() -> None:
    traffic = Traffic(requests_per_s=10, duration_s=20)
    assert warmup_s(traffic, Load()) == 2.0
    rows = planned_requests(traffic, Load(ramp_to=30), seed=0)
    assert sum((row.at_s or 0) < 2.0 for row in rows) == 20 and len(rows) == 20 + 400


def test_lengths_spread_about_their_means() -> None:
    draw = lengths(Traffic(tokens_in=400, tokens_out=100), Load(length_spread=0.5), seed=1)
    pairs = [draw() for _ in range(4000)]
    for column, wanted in zip(zip(*pairs, strict=True), (400, 100), strict=True):
        assert mean(column) == pytest.approx(wanted, rel=0.05)
        assert pstdev(column) / mean(column) == pytest.approx(0.5, abs=0.07)
    assert lengths(Traffic(), Load(), seed=1)() == (512, 128)


def test_a_second_stream_comes_at_its_own_rate_and_length() -> None:
    traffic = Traffic(requests_per_s=4, tokens_in=100, tokens_out=10, long_requests_per_s=1.5, duration_s=100)
    rows = planned_requests(traffic, Load(warmup_s=20, length_spread=0.5), seed=0)
    long = [row for row in rows if row.is_long]
    assert len(long) == 180 and len(rows) - len(long) == 480
    assert {(row.tokens_in, row.tokens_out) for row in long} == {(8192, 64)}
    times = [row.at_s or 0.0 for row in rows]
    assert times == sorted(times) and max(times) < 120
    assert traffic.tokens_in_per_s == 4 * 100 + 1.5 * 8192 and traffic.total_per_s == 5.5
    alone = planned_requests(Traffic(requests_per_s=4, tokens_in=100, tokens_out=10, duration_s=100), Load(), seed=0)
    assert not any(row.is_long for row in alone)


def test_the_streams_come_independently() -> None:
    rows = planned_requests(Traffic(requests_per_s=4, long_requests_per_s=4), Load(warmup_s=0), seed=0)
    short, long = ([row.at_s for row in rows if row.is_long is which] for which in (False, True))
    assert len(short) == len(long) and short != long and mean(short) != mean(long)


def test_a_test_of_so_many_requests_ends_both_streams() -> None:
    traffic = Traffic(requests_per_s=10, long_requests_per_s=10, duration_s=1000)
    rows = planned_requests(traffic, Load(warmup_s=0, requests=50), seed=0)
    assert sum(not row.is_long for row in rows) == 50 and 35 < sum(row.is_long for row in rows) <= 50
