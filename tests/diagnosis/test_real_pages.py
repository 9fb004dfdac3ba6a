"""Figures of a real vLLM's page after four load tests: what limited each, as its clients found out.

Where the figures come from is in data/rtx4090/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.evidence.server_load import Load, load_of
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.metrics_page import reading_of_page
from armillary.diagnosis.readings.reading import Reading
from armillary.store.home import Home

DATA = Path(__file__).parent / "data" / "rtx4090"
LASTED_S = {"batch_of_32": 71.8, "full_cache": 234.5, "prefix_cache_off": 61.8, "sixteen_users": 11.3}
Cli = Callable[..., Any]


def reading_of(name: str) -> Reading:
    """Looked at when the run began, with nothing yet on the page, and when it was over."""
    text = (DATA / f"{name}.prom").read_text()
    counts = [line for line in text.splitlines() if "_info{" not in line]
    nothing = "\n".join(line.rpartition(" ")[0] + " 0" for line in counts)
    return reading_of_page(text, source=name, earlier=nothing, seconds=LASTED_S[name])


def load(name: str) -> Load:
    found = load_of(reading_of(name))
    assert found is not None
    return found


def finding(found: Diagnosis, cause: str) -> Finding:
    return next(one for one in found.findings if one.cause == cause)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("batch_of_32", "batch_too_small"),
        ("full_cache", "preemption"),
        ("prefix_cache_off", "prefill_interference"),
        ("sixteen_users", None),
    ],
)
def test_what_limited_each_run(home: Home, name: str, cause: str | None) -> None:
    found = diagnose(reading_of(name), home)
    assert (found.judged, found.loop, found.cause) == (True, "product" if cause else None, cause)


@pytest.mark.parametrize(
    ("name", "users", "limit"),
    [
        ("batch_of_32", 160, 32),
        ("full_cache", 192, 145),
        ("prefix_cache_off", 64, 256),
        ("sixteen_users", 16, 256),
    ],
)
def test_batch_and_queue_of_a_load_that_is_over(name: str, users: int, limit: int) -> None:
    """Means over the steps, with their ramp at the start and the end; the page itself says that nobody is there."""
    found = load(name)
    assert 0.75 * min(users, limit) < found.running <= min(users, limit)
    assert 0.8 * users < found.running + found.waiting <= users
    assert any(note.startswith("nobody is there now") for note in reading_of(name).notes)


def test_a_batch_of_32_for_160_users(home: Home) -> None:
    """The log of that server said 5 to 8 % of the cache; 128 or 256 in the batch gave 2,753 and 2,735 tokens/s."""
    reading = reading_of("batch_of_32")
    assert reading.values["kv_used_fraction"] == pytest.approx(0.07, abs=0.015)
    assert reading.values["tokens_out_per_s"] == pytest.approx(2281, rel=0.02), "clients leave their warm-up out"
    lever = diagnose(reading, home).levers[0]
    assert lever.action == "--max-num-seqs 256" and lever.basis.startswith("at most")
    assert lever.speedup == pytest.approx(2735 / 2281, rel=0.2) and lever.speedup > 2735 / 2281


def test_a_cache_for_145_of_192_users(home: Home) -> None:
    """Without preemptions, with 128 users, the same server gave 920 tokens/s instead of 838: memory buys that much."""
    reading = reading_of("full_cache")
    assert reading.values["kv_used_fraction"] > 0.8
    assert reading.values["preemptions_per_request"] == pytest.approx(47 / 776)
    lever = diagnose(reading, home).levers[0]
    assert lever.action == "--kv-cache-dtype fp8" and lever.speedup == pytest.approx(920 / 838, rel=0.05)


def test_long_prompts_with_the_prefix_cache_off(home: Home) -> None:
    """1,500 of 1,756 tokens were alike, which the page cannot know: turning the cache on gave 2.64 times as much."""
    found = diagnose(reading_of("prefix_cache_off"), home)
    assert load("prefix_cache_off").prompts_share > 0.7
    cache = finding(found, "cache_misses")
    lever = cache.levers[0]
    assert lever.action == "--enable-prefix-caching" and "trying costs nothing" in cache.says
    assert lever.at_most is not None and lever.speedup <= 2799 / 1060 <= lever.at_most


def test_steps_with_prompts_are_told_from_those_without() -> None:
    """A step of 32 decodes took 7 to 9 ms there, one of 2,048 prompt tokens 130 to 190 ms."""
    found = load("batch_of_32")
    assert found.parted and found.usual_gap_s == pytest.approx(0.008, abs=0.0015)
    assert 2048 * found.prompt_token_s == pytest.approx(0.16, abs=0.03)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("batch_of_32", "batch_too_small"),
        ("full_cache", "preemption"),
        ("prefix_cache_off", "prefill_interference"),
        ("sixteen_users", None),
    ],
)
def test_one_look_at_a_saved_page_will_do(cli: Cli, name: str, cause: str | None) -> None:
    found = cli("diagnose", str(DATA / f"{name}.prom"), "--json").json
    assert (found["loop"], found["cause"]) == ("product" if cause else None, cause)


def test_a_lever_that_only_trying_can_price_is_not_called_worthless(cli: Cli) -> None:
    said = cli("diagnose", str(DATA / "prefix_cache_off.prom")).out
    line = next(one for one in said.splitlines() if "--enable-prefix-caching" in one)
    assert "predicted 1.00 to" in line and "not worth it" not in line and "the prefix cache is off" in said


@given(st.sampled_from(sorted(LASTED_S)), st.randoms(use_true_random=False), st.floats(0.05, 0.95), st.booleans())
@settings(deadline=None)
def test_whatever_a_page_leaves_out(
    tmp_path_factory: pytest.TempPathFactory, name: str, random: Random, kept: float, again: bool
) -> None:
    """Older servers, other servers and torn files have fewer lines; none of them may be anything but read."""
    lines = (DATA / f"{name}.prom").read_text().splitlines()
    part = "\n".join(line for line in lines if line.startswith("vllm:num_requests") or random.random() < kept)
    reading = reading_of_page(part, source="x", earlier=part if again else None, seconds=5.0)
    found = diagnose(reading, Home.at(tmp_path_factory.getbasetemp()))
    assert all(0 < lever.speedup < 1000 for lever in found.levers) and found.to_json()


def test_preemptions_of_long_ago_do_not_count() -> None:
    """Looked at twice: 47 of them were before the first look, and as many requests again ended after it."""
    text = (DATA / "full_cache.prom").read_text()
    parts = [line.rpartition(" ") for line in text.splitlines()]
    later = "\n".join(
        f"{name} {2 * float(value)}" if "preemptions" not in name and "_info{" not in name else f"{name} {value}"
        for name, _, value in parts
    )
    reading = reading_of_page(later, source="x", earlier=text, seconds=234.5)
    assert reading.values["preemptions_total"] == 47 and reading.values["preemptions_per_request"] == 0
    lately, since = (load_of(one) for one in (reading, reading_of_page(later, source="x")))
    assert lately is not None and since is not None and lately.preempted == 0 < since.preempted
