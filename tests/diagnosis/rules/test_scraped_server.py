"""Servers known by their metrics page alone: the right cause, the flag against it, and what it would buy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.server_load import load_of
from armillary.diagnosis.readings.metrics_page import reading_of_page
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.scraped_server import RULES
from armillary.store.home import Home
from tests.diagnosis.data.make_vllm_pages import CASES, Case, pages
from tests.diagnosis.readings.test_metrics_page import SGLANG, TGI

DATA = Path(__file__).parents[1] / "data"
Cli = Callable[..., Any]


def page(text: str, **changed: float) -> Reading:
    reading = reading_of_page(text, source="x")
    return replace(reading, values=dict(reading.values) | changed)


@pytest.mark.parametrize(
    ("name", "cause", "flag"),
    [
        ("batch_limited", "batch_too_small", "--max-num-seqs 256"),
        ("kv_full", "preemption", "--kv-cache-dtype fp8"),
        ("saturated", "too_few_replicas", "one more server behind a router, or --data-parallel-size 3"),
        ("interference", "prefill_interference", "--max-num-batched-tokens 1024"),
    ],
)
def test_recorded_pages_of_vllm_through_the_command_line(cli: Cli, name: str, cause: str, flag: str) -> None:
    ran = cli("diagnose", str(DATA / f"synthetic_vllm_{name}.prom"), "--json")
    found = ran.json
    assert (ran.code, found["loop"], found["cause"]) == (0, "product", cause)
    assert found["levers"][0]["action"] == flag and found["levers"][0]["speedup"] > 1.2


def test_the_flag_stands_in_the_lever_s_line(cli: Cli) -> None:
    said = cli("diagnose", str(DATA / "synthetic_vllm_batch_limited.prom")).out
    assert "product loop limits this run" in said and "--max-num-seqs 256" in said


@pytest.mark.parametrize("name", ["synthetic_vllm_healthy", "vllm_2026_one_user"])
def test_a_server_with_room_is_left_alone(cli: Cli, name: str) -> None:
    assert cli("diagnose", str(DATA / f"{name}.prom"), "-q").out == "healthy\n"


def test_a_real_server_that_drowns(cli: Cli) -> None:
    """SGLang with 2,826 requests waiting: three quarters of its requests took longer than half a minute to begin."""
    found = cli("diagnose", str(DATA / "sglang_overloaded.prom"), "--json").json
    assert (found["loop"], found["cause"]) == ("product", "too_few_replicas")
    assert found["levers"][0]["action"] == "one more server behind a router, or --dp-size 2"
    assert found["levers"][0]["speedup"] == pytest.approx((11228 + 2826 + 162) / 11228), "what came over what was done"


LORA = (
    'vllm:lora_requests_info{{max_lora="{slots}",running_lora_adapters="{running}",'
    'waiting_lora_adapters="{waiting}"}} {at}'
)


def with_adapters(text: str, *sets: tuple[str, str], slots: int = 2) -> str:
    """The page with what vLLM says of adapters: (running, waiting), the latest last."""
    said = [LORA.format(slots=slots, running=one, waiting=two, at=1.7e9 + i) for i, (one, two) in enumerate(sets)]
    return "\n".join(("# TYPE vllm:lora_requests_info gauge", *said, text))


def test_adapters_that_take_turns_in_too_few_slots() -> None:
    limited = (DATA / "synthetic_vllm_batch_limited.prom").read_text()
    found = diagnose(page(with_adapters(limited, ("a", ""), ("a,b", "b,c, d"))), Home.at("/nonexistent"))
    assert (found.cause, found.levers[0].action) == ("adapter_thrashing", "--max-loras 4")
    assert found.levers[0].at_most is not None and found.levers[0].at_most > 1.2
    for sets in ([("a,b", "b")], [("a", "c")], [("a,b", "c"), ("a,b", "a")]):
        other = diagnose(page(with_adapters(limited, *sets)), Home.at("/nonexistent"))
        assert other.cause == "batch_too_small", "none waits for a slot, or one is free, or that is over"
    full = (DATA / "synthetic_vllm_kv_full.prom").read_text()
    assert diagnose(page(with_adapters(full, ("a,b", "c"))), Home.at("/nonexistent")).cause == "preemption"


def throughput(case: Case) -> float:
    first, second = (reading_of_page(text, source="x").values["tokens_out_total"] for text in pages(case, 8.0, 18.0))
    return second - first


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_limited", {"max_num_seqs": 256}),
        pytest.param("kv_full", {"num_gpu_blocks": 6000}, marks=pytest.mark.slow),
    ],
)
def test_what_a_lever_is_said_to_buy_is_about_what_the_server_would_do(home: Home, name: str, change: Any) -> None:
    reading = reading_of_page((DATA / f"synthetic_vllm_{name}.prom").read_text(), source="x")
    predicted = diagnose(reading, home).levers[0].speedup
    obtained = throughput(replace(CASES[name], **change)) / throughput(CASES[name])
    assert obtained > 1.3 and predicted == pytest.approx(obtained, rel=0.2)


def test_a_full_cache_without_preemptions_is_pressure() -> None:
    text = (DATA / "synthetic_vllm_kv_full.prom").read_text()
    causes = {found.cause for rule in RULES if (found := rule(page(text, preemptions_total=0.0), None))}
    assert "kv_pressure" in causes and not causes & {"preemption", "batch_too_small", "too_few_replicas"}


def test_a_cache_in_8_bits_leaves_replicas() -> None:
    text = (DATA / "synthetic_vllm_kv_full.prom").read_text().replace('cache_dtype="auto"', 'cache_dtype="fp8_e5m2"')
    found = next(found for rule in RULES if (found := rule(page(text), None)) and found.cause == "preemption")
    assert [lever.title.split()[0] for lever in found.levers] == ["replicas", "more"]


def test_a_queue_that_is_there_now_counts_whatever_the_history() -> None:
    text = (DATA / "synthetic_vllm_healthy.prom").read_text()
    causes = [found.cause for rule in RULES if (found := rule(page(text, waiting=60.0), None))]
    assert causes == ["batch_too_small"] and not [1 for rule in RULES if rule(page(text, waiting=2.0), None)]


def test_an_idle_server_is_not_judged(home: Home) -> None:
    idle = next(pages(Case(clients=0), 0.0))
    found = diagnose(reading_of_page(idle, source="x"), home)
    assert not found.judged and any("nothing to judge" in note for note in found.notes)


def test_bursts_are_told_from_a_queue() -> None:
    text = (DATA / "synthetic_vllm_batch_limited.prom").read_text()
    causes = [found.cause for rule in RULES if (found := rule(page(text, waiting=0.0), None))]
    assert causes == ["queueing"]


def test_a_prefix_cache_that_is_off_is_priced_by_what_repeats() -> None:
    off = (DATA / "synthetic_vllm_saturated.prom").read_text().replace('caching="True"', 'caching="False"')
    unknown = next(found for rule in RULES if (found := rule(page(off), None)) and found.cause == "cache_misses")
    assert unknown.levers[0].action == "--enable-prefix-caching" and unknown.levers[0].speedup == 1.0
    assert "does not say" in unknown.says
    asked = page(off).values["tokens_in_total"]
    told = page(off, prefix_repeated_total=asked / 2)
    known = next(found for rule in RULES if (found := rule(told, None)) and found.cause == "cache_misses")
    load = load_of(told)
    assert load is not None and known.levers[0].speedup == pytest.approx(1 / (1 - load.prompts_share / 2))


def test_other_servers_are_told_their_own_flags(home: Home) -> None:
    sglang = diagnose(reading_of_page(SGLANG, source="x"), home)
    assert (sglang.cause, sglang.levers[0].action) == ("batch_too_small", "--max-running-requests 88")
    tgi = diagnose(reading_of_page(TGI, source="x"), home)
    assert tgi.cause == "too_few_replicas", "TGI does not say how full its cache is"
    ours = replace(reading_of_page(SGLANG, source="x"), by="armillary")
    assert diagnose(ours, home).levers[0].sets == "--set serve.max_running=88"


def test_pages_that_say_too_little_are_left_alone() -> None:
    bare = page("vllm:num_requests_running 3\nvllm:num_requests_waiting 9\n")
    assert all(rule(bare, None) is None for rule in RULES)
    assert all(rule(page("vllm:num_requests_running 0\n"), None) is None for rule in RULES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "cases"),
    [
        (
            "batch_too_small",
            [
                Case(max_num_seqs=4, clients=8),
                Case(max_num_seqs=8, clients=64),
                Case(max_num_seqs=16, clients=32),
                Case(max_num_seqs=64, clients=400),
                Case(max_num_seqs=8, clients=40, fixed_s=0.03, token_s=8e-5),
                Case(max_num_seqs=8, clients=40, tokens_in=200, tokens_out=800),
            ],
        ),
        (
            "preemption",
            [
                Case(num_gpu_blocks=1500, clients=128, tokens_out=400),
                Case(num_gpu_blocks=3000, clients=90, tokens_out=400),
                Case(num_gpu_blocks=6000, clients=300, tokens_out=400),
                Case(num_gpu_blocks=3000, clients=256, tokens_out=1000),
            ],
        ),
        (
            "too_few_replicas",
            [
                Case(clients=0, rate=20, tokens_in=2400, tokens_out=40),
                Case(clients=0, rate=80, tokens_in=2400, tokens_out=40),
                Case(clients=0, rate=30, tokens_in=1200, tokens_out=100),
                Case(clients=0, rate=10, tokens_in=4800, tokens_out=60),
            ],
        ),
        (
            "prefill_interference",
            [
                Case(clients=24, tokens_in=2000, tokens_out=400, max_num_batched_tokens=8192),
                Case(clients=24, tokens_in=8000, tokens_out=400, max_num_batched_tokens=8192),
                Case(clients=12, tokens_in=5000, tokens_out=400, max_num_batched_tokens=4096),
            ],
        ),
        (
            None,
            [
                Case(clients=1),
                Case(clients=8),
                Case(clients=128),
                Case(clients=0, rate=2),
                Case(clients=0, rate=15),
                Case(clients=16, tokens_in=3000, tokens_out=300, max_num_batched_tokens=512),
            ],
        ),
    ],
)
def test_other_sizes_and_severities(home: Home, cause: str | None, cases: list[Case]) -> None:
    for case in cases:
        found = diagnose(reading_of_page(next(pages(case, 40.0)), source="x"), home)
        assert found.cause == cause, case
