"""Whole load tests against a server of known delays: what it was told to do is what is reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput, NotFound
from armillary.serving.load.load_page import page
from armillary.serving.load.multi_process import send_in_processes, split_job
from armillary.serving.load.probe import probe
from armillary.serving.load.prompts import PromptMaker
from armillary.serving.load.rate_search import rate_runner, search_rate
from armillary.serving.load.report_text import latency_rows, plain, rate_rows, title_text
from armillary.serving.load.run import LoadTest, load_test
from armillary.serving.load.sender import SendJob
from armillary.spec.tables.traffic import Load, Objective, Traffic
from tests.serving.load.fake_server import Fake, fake_server

TRAFFIC = Traffic(requests_per_s=40, tokens_in=60, tokens_out=8, duration_s=1.0)


def asked(traffic: Traffic = TRAFFIC, objective: Objective | None = None, **load: Any) -> LoadTest:
    return LoadTest(traffic=traffic, load=Load(**{"warmup_s": 0.1} | load), objective=objective or Objective())


def test_the_delays_told_are_the_delays_reported() -> None:
    """One request in ten waits 0.4 s, so p99 is at least that. Delays can only come out longer."""
    with fake_server(first_s=(0.05,) * 9 + (0.4,), gap_s=0.01) as fake:
        report = load_test(fake.url, asked())
    found = report.last
    assert found.failed == 0 and found.requests == 40 and found.offered_per_s == pytest.approx(40)
    assert 0.05 <= found.ttft.p50_s <= found.ttft.p99_s and found.itl.p50_s >= 0.01 and found.itl.count == 40 * 7
    assert found.tpot.p50_s >= 0.01 and found.e2e.p50_s >= 0.05 + 7 * 0.01
    assert found.due_ttft.p99_s >= found.ttft.p99_s >= 0.4
    assert found.tokens_out == 8 and found.counted_by == "usage" and found.tokens_in == pytest.approx(60, abs=2)


@pytest.mark.slow  # judges the clock
def test_the_delays_reported_are_hardly_longer_than_those_told() -> None:
    """One request in ten waits 0.4 s: p50 knows nothing of it, p99 does."""
    with fake_server(first_s=(0.05,) * 9 + (0.4,), gap_s=0.01) as fake:
        last = load_test(fake.url, asked()).last
    assert 0.05 <= last.ttft.p50_s < 0.4 <= last.ttft.p99_s < 0.8 and 0.01 <= last.itl.p50_s < 0.04


@pytest.mark.slow  # judges the clock
def test_a_stalled_server_does_not_slow_the_sending_down() -> None:
    """One at a time, 0.06 s each, and 40 come in a second: an honest client keeps sending, and the last waits long."""
    with fake_server(first_s=(0.06,), gap_s=0.0, slots=1) as fake:
        report = load_test(fake.url, asked(Traffic(requests_per_s=40, tokens_in=9, tokens_out=1, duration_s=0.7)))
        times = fake.arrived[2:]  # after the trial requests
    assert len(times) == 4 + 28 and times[-1] - times[0] < 1.5  # 1.9 s of work
    assert report.last.e2e.max_s > 0.8 and report.last.backlog_growth > 10


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    with fake_server(first_s=(0.02,), gap_s=0.001) as fake:
        report = load_test(fake.url, asked(concurrency=4, requests=30))
    assert report.last.requests >= 30 and report.last.failed == 0 and report.last.in_flight <= 4.01
    assert "closed loop, 4 clients, 30 requests" in title_text(report)


def test_what_goes_wrong_is_counted_by_its_reason() -> None:
    with fake_server(first_s=(0.001,), fails=(9, 12), cuts=(15,)) as fake:
        report = load_test(fake.url, asked(warmup_s=0))
    assert report.last.errors == {"HTTP 500: not now": 2, "the stream ended before the response was complete": 1} or (
        report.last.errors["HTTP 500: not now"] == 2 and report.last.failed == 3
    )
    assert report.last.slo_met_fraction == pytest.approx(37 / 40)


def test_a_server_that_takes_too_long_is_an_error() -> None:
    with fake_server(first_s=(0.01, 0.01, 5.0), gap_s=0.0) as fake:
        report = load_test(fake.url, asked(requests=3, warmup_s=0, timeout_s=0.6))
    assert report.last.errors == {"timed out": 1}


@pytest.mark.parametrize(
    ("settings", "expected", "words"),
    [
        ({"refuses": ("ignore_eos",)}, {"api": "chat", "usage": True, "exact": False}, "may be shorter"),
        ({"refuses": ("ignore_eos", "stream_options")}, {"api": "chat", "usage": False}, "counts as a token"),
        ({"usage": False}, {"usage": True}, "counts as a token"),
        ({"chat": False}, {"api": "completions", "usage": True, "exact": True}, "characters per token"),
    ],
)
def test_the_form_of_request_is_found(settings: dict[str, Any], expected: dict[str, Any], words: str) -> None:
    with fake_server(first_s=(0.001,), gap_s=0.0, **settings) as fake:
        found = probe(fake.url, Load())
    assert {key: getattr(found.target, key) for key in expected} == expected and found.target.model == "fake"
    assert any(words in note for note in found.notes), found.notes


def test_tokens_are_counted_by_pieces_where_nobody_counts_them() -> None:
    with fake_server(first_s=(0.001,), gap_s=0.0, usage=False) as fake:
        report = load_test(fake.url, asked(requests=5))
    assert report.last.counted_by == "chunks" and report.last.tokens_out == 8
    assert any("counted as streamed chunks" in note for note in report.notes)


def test_pieces_of_several_tokens_are_told_apart_from_tokens() -> None:
    with fake_server(first_s=(0.001,), gap_s=0.002, tokens_per_chunk=4) as fake:
        report = load_test(fake.url, asked(requests=5))
    assert report.last.tokens_per_chunk == 4 and any("holds 4.00 tokens" in note for note in report.notes)


def test_prompts_share_what_they_should() -> None:
    with fake_server(first_s=(0.001,), gap_s=0.0) as fake:
        traffic = Traffic(requests_per_s=50, tokens_in=50, tokens_out=1, shared_prefix=30)
        load_test(fake.url, asked(traffic, requests=6, warmup_s=0))
        prompts = [body["messages"][0]["content"] for body in fake.bodies[2:]]
    assert len({prompt[:100] for prompt in prompts}) == 1 and len(set(prompts)) == 6


@pytest.mark.slow
def test_the_search_ends_near_what_the_server_can_do() -> None:
    """Two slots of 0.05 s: 40 a second, and no more."""
    with fake_server(first_s=(0.05,), gap_s=0.0, slots=2) as fake:
        test = asked(Traffic(requests_per_s=16, tokens_in=9, tokens_out=1, duration_s=1.2, arrival="constant"))
        found = search_rate(rate_runner(probe(fake.url, Load()), test), Objective(), start=16)
    assert found.best is not None and found.failed is not None
    assert 16 <= found.best < found.failed <= 64 and found.best <= 46  # a loaded machine can only find less


def test_repeats_have_intervals_and_the_report_says_everything(tmp_path: Path) -> None:
    with fake_server(first_s=(0.01,), gap_s=0.001) as fake:
        report = load_test(fake.url, asked(repeats=2, requests=10, objective=Objective(ttft_p99_s=5.0)))
    assert len(report.runs) == 2 and all("±" in cell for cell in latency_rows(report)[0][1:6])
    assert dict(rate_rows(report, 3.6))["cost"].startswith("$")
    answer = plain(report, usd_per_hour=3.6)
    figure = answer["figures"]["ttft_p99_s"]
    assert figure["half_width"] is not None and answer["definitions"]["TPOT"]
    whole = 3.6 / 3600 / (report.last.tokens_in_per_s + report.last.tokens_out_per_s) * 1e6
    assert answer["million_tokens_usd"] == pytest.approx(whole)
    text = page(report, None, 3.6)
    assert text.count("<svg") == 2 * 6  # for wide and for narrow screens
    assert "http://127" in text and "src=" not in text and "<script" not in text


def job() -> SendJob:
    with fake_server(first_s=(0.001,), gap_s=0.0) as fake:
        probed = probe(fake.url, Load())
    return SendJob(
        target=probed.target,
        prompts=PromptMaker(cut=probed.cut),
        traffic=TRAFFIC,
        load=Load(),
        rows=(),
        clients=5,
        first=0,
        stride=1,
        warmup_s=0.0,
        stop_s=1.0,
        max_requests=11,
    )


def test_several_processes_share_the_work_out() -> None:
    shares = split_job(job(), 3)
    assert [part.clients for part in shares] == [2, 2, 1] and [part.max_requests for part in shares] == [4, 4, 3]
    assert [(part.first, part.stride) for part in shares] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("when", ["before it is ready", "at work"])
def test_a_sending_process_that_dies_is_one_line(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = """
import os, signal
from armillary.serving.processes.worker_process import serve_messages
replies = iter([{}])
serve_messages(lambda message: next(replies, None) or os.kill(os.getpid(), signal.SIGKILL))
"""
    replies = "" if when == "before it is ready" else "True"
    begun = subprocess.Popen

    def start(command: list[str], **pipes: Any) -> Any:
        return begun([sys.executable, "-c", dies.format(replies), command[-1]], **pipes)

    monkeypatch.setattr("armillary.serving.processes.worker_process.subprocess.Popen", start)
    with pytest.raises(BadInput, match=r"killed by signal 9.*try fewer load\.processes"):
        send_in_processes(job(), 2)


@pytest.mark.slow
def test_two_processes_send_what_one_would() -> None:
    with fake_server(first_s=(0.01,), gap_s=0.001) as fake:
        report = load_test(fake.url, asked(processes=2, requests=20, warmup_s=0))
    assert report.last.requests == 20 and report.last.failed == 0


def test_nobody_there_and_nonsense() -> None:
    with pytest.raises(NotFound, match="no server responds at"):
        probe("127.0.0.1:9", Load())
    with pytest.raises(BadInput, match="is not the address"):
        probe("ftp://x", Load())
    with fake_server(refuses=("model",)) as fake, pytest.raises(BadInput, match="no model here"):
        probe(fake.url, Load())


def test_requests_that_the_server_is_too_short_for_are_not_sent(cli: Callable[..., Any]) -> None:
    with fake_server(card={"max_model_len": 256}) as fake:
        ran = cli("load", fake.url, "--rate", "4")
        sent = len(fake.bodies)
        line = ran.err.strip()
        fits = cli(
            "load",
            fake.url,
            "--rate",
            "100",
            "--duration",
            "0.1",
            "--set",
            "load.warmup_s=0",
            *line.rpartition("; try ")[2].split(),
            "-q",
        )
    assert (ran.code, len(line.splitlines())) == (2, 1) and "fake takes 256 tokens per request" in line
    assert sent < 6, "trial requests only"
    assert fits.code == 0, fits.err


def test_long_prompts_that_the_server_is_too_short_for_are_named(cli: Callable[..., Any]) -> None:
    with fake_server(card={"max_model_len": 4096}) as fake:
        ran = cli("load", fake.url, "--rate", "4", "--set", "traffic.long_requests_per_s=1")
    assert ran.code == 2 and "this traffic has 8,192 + 64; try --set traffic.long_tokens_in=2048" in ran.err


@pytest.mark.slow
def test_the_verb_searches(cli: Callable[..., Any]) -> None:
    """Ten requests at 100 a second succeed, whatever comes after them fails."""
    with fake_server(first_s=(0.001,), gap_s=0.0, fails=tuple(range(12, 2000))) as fake:
        ran = cli(
            "load",
            fake.url,
            "--search",
            "--rate",
            "100",
            "--duration",
            "0.1",
            "--set",
            "load.warmup_s=0",
            "--set",
            "traffic.tokens_out=1",
        )
    assert ran.code == 0 and "highest sustainable rate 100 requests/s" in ran.out and "requests failed" in ran.out


@pytest.fixture
def attempt(cli: Callable[..., Any], tmp_path: Path) -> tuple[Any, Fake, Path]:
    page = str(tmp_path / "r.html")
    with fake_server(first_s=(0.005,), gap_s=0.001) as fake:
        ran = cli(
            "load",
            fake.url,
            "--rate",
            "30",
            "--duration",
            "0.5",
            "--page",
            page,
            "--set",
            "cost.usd_per_device_hour=2",
            "--set",
            "traffic.tokens_out=4",
            "--set",
            "objective.ttft_p99_s=9",
            "--json",
        )
    return ran, fake, tmp_path / "r.html"


def test_the_verb(attempt: tuple[Any, Fake, Path]) -> None:
    ran, fake, path = attempt
    assert ran.code == 0, ran.err
    assert ran.json["runs"][0]["requests"] == 15 and ran.json["figures"]["slo_met_fraction"]["mean"] == 1.0
    assert ran.json["million_tokens_usd"] > 0 and fake.bodies[-1]["max_tokens"] == 4
    assert "<svg" in path.read_text()


def test_the_verb_in_words(cli: Callable[..., Any]) -> None:
    with fake_server(first_s=(0.005,), gap_s=0.001) as fake:
        ran = cli("load", fake.url, "--rate", "30", "--duration", "0.5", "--set", "objective.ttft_p99_s=9")
    assert ran.code == 0 and "TTFT" in ran.out and "9 s ✓" in ran.out and "TTFT from due time" in ran.out
    assert "0 of 15 requests" in ran.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--search", "--clients", "3"), "--search varies the rate"),
        (("--rate", "0"), "0.0 is not in the range x>0"),
        (("--clients", "3", "--set", "load.trace=x.csv"), "leave one out"),
        (("--set", "cost.usd_per_device_hour=-1"), "must be at least 0"),
        (("--price", "2"), "--price is no more; try --set cost.usd_per_device_hour="),
        (("--trace", "x.csv"), "--trace is no more; try --set load.trace="),
    ],
)
def test_the_verb_refuses(cli: Callable[..., Any], flags: tuple[str, ...], words: str) -> None:
    ran = cli("load", "127.0.0.1:9", *flags)
    assert ran.code == 2 and words in ran.err


def test_a_window_in_which_no_answer_ended_is_explained() -> None:
    """completed 0.00 requests/s beside 0 errors looks like a fault of the test."""
    with fake_server(first_s=(1.5,), gap_s=0.0) as fake:
        report = load_test(fake.url, asked(replace(TRAFFIC, requests_per_s=20.0, duration_s=0.5)))
    assert report.last.failed == 0 and report.last.requests_per_s == 0
    assert any("none counts as completed" in note and "lower --rate" in note for note in report.notes)
