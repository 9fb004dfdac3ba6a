"""`armillary plan --for serve`: the page, the other ways, the terms, JSON, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.spec.gauges import GAUGES

Cli = Callable[..., Any]
CHAT = ("--set", "traffic.requests_per_s=20", "--set", "traffic.tokens_in=1000", "--set", "traffic.tokens_out=250")
SERVE = ("plan", "--model", "llama-3.1-8b", "--on", "h100x8", "--for", "serve", *CHAT)
FIXTURE = Path(__file__).parents[2] / "planning" / "published" / "published_inference_40.csv"


def test_the_page_answers_in_the_order_a_person_asks(cli: Cli) -> None:
    out = cli(*SERVE, "--set", "objective.ttft_p99_s=1").out
    labels = ["replica", "memory / device", "KV cache", "needed", "TTFT", "ITL", "throughput", "cost", "disaggregated"]
    places = [out.index(f" {label}  ") for label in labels]
    assert places == sorted(places) and "$/M tokens" in out


def test_traffic_that_nobody_named_is_said(cli: Cli) -> None:
    unsaid = cli("plan", "--model", "llama-3.1-8b", "--on", "h100x8", "--for", "serve").out
    assert "this traffic was assumed" in unsaid and "was assumed" not in cli(*SERVE).out


def test_json_holds_gauges_and_every_way(cli: Cli) -> None:
    found = cli(*SERVE, "--json").json
    assert found["for"] == "serve" and set(found["predicted"]) <= set(GAUGES)
    assert found["predicted"]["devices"] == found["choices"][0]["devices"]
    assert cli(*SERVE, "-q").out.strip() == str(int(found["predicted"]["devices"]))


def test_search_lists_ways_and_what_the_others_lack(cli: Cli) -> None:
    ran = cli("plan", "search", "--model", "llama-3.1-70b", "--on", "h100x8", "--for", "serve", *CHAT)
    assert ran.code == 0 and "ways meet the objectives" in ran.out and "not tp=1 bf16: llama-3.1-70b" in ran.out


def test_explain_puts_numbers_in_the_formulas(cli: Cli) -> None:
    out = cli("plan", "explain", *SERVE[1:]).out
    assert "d(b) / (1 − λ·p)" in out and "⌈20 / " in out


def test_a_recipe_goes_through(cli: Cli, tmp_path: Path) -> None:
    recipe = tmp_path / "chat.toml"
    recipe.write_text(
        '[model]\nname = "mixtral-8x7b"\n[hardware]\non = "h100x8"\n[layout]\ntp = 2\nprecision = "fp8"\n'
        "[traffic]\nrequests_per_s = 2.0\n[objective]\nitl_p99_s = 0.2\n"
    )
    found = cli("plan", str(recipe), "--for", "serve", "--json").json
    assert found["layout"]["tp"] == 2 and found["formats"]["weights"] == "fp8" and len(found["choices"]) == 1


def test_an_inference_table_is_judged(cli: Cli) -> None:
    found = cli("plan", "table", str(FIXTURE), "--json").json
    summary = found["summary"]
    assert len(found["rows"]) == 40 and summary["predicted"] >= 0.95
    assert summary["held_out"]["mape"] <= 0.15 < summary["physics_only"]["mape"] + 0.1
    assert any(row["reason"] for row in found["rows"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--set", "layout.tp=3"), "tp=3 does not divide 8 KV heads of llama-3.1-8b; try --set layout.tp=2 or 4"),
        (("--set", "objective.itl_p99_s=0.00001"), "itl_p99_s=10 µs cannot be met"),
        (("--set", "traffic.tokens_in=500000"), "requests of 500,250 tokens exceed the 131,072 of llama-3.1-8b"),
        (("--set", "cost.usd_per_device_hour=-1"), "cost.usd_per_device_hour=-1.0 must be at least 0"),
    ],
)
def test_errors_are_one_line(cli: Cli, changes: tuple[str, ...], message: str) -> None:
    ran = cli(*SERVE, *changes)
    assert ran.code == 2 and message in ran.err and len(ran.err.strip().splitlines()) == 1


def test_a_model_bigger_than_the_cluster_is_one_line(cli: Cli) -> None:
    ran = cli("plan", "--model", "deepseek-v3", "--on", "l4", "--for", "serve")
    assert ran.code == 2 and "needs" in ran.err and "try --set layout.tp=" in ran.err


def test_any_ranks_the_catalogue_s_nodes(cli: Cli) -> None:
    ran = cli("plan", "search", "--model", "llama-3.1-8b", "--on", "any", "--for", "serve", "--json")
    met = [row for row in ran.json if row["meets"]]
    assert ran.code == 0 and len(met) > 20 and all(set(row["predicted"]) <= set(GAUGES) for row in met)
    assert ran.json[: len(met)] == met, "those that meet the objectives come first"
