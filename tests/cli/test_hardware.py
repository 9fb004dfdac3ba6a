"""`armillary hardware`: lists, and things side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from armillary.spec import catalogue

Cli = Callable[..., Any]


def rows(text: str) -> dict[str, str]:
    """First column -> the rest of the line."""
    return {line.split("  ")[0]: line for line in text.splitlines() if line and not line.startswith(" ")}


@pytest.mark.parametrize("flag", [(), ("--nodes",), ("--links",), ("--storage",)])
def test_lists_fit_a_hundred_columns_unfolded(cli: Cli, flag: tuple[str, ...]) -> None:
    ran = cli("hardware", *flag)
    names = cli("hardware", *flag, "-q").out.splitlines()
    shown = [line.split(" ")[0] for line in ran.out.splitlines()]
    assert ran.code == 0 and set(names) <= set(shown)
    assert max(map(len, ran.out.splitlines())) <= 100


def test_lists_as_json(cli: Cli) -> None:
    assert [row["name"] for row in cli("hardware", "--json").json] == list(catalogue.chips())
    assert {row["name"] for row in cli("hardware", "--links", "--json").json} == set(catalogue.links())
    assert {row["name"] for row in cli("hardware", "--storage", "--json").json} == set(catalogue.storages())
    assert {row["name"] for row in cli("hardware", "--nodes", "--json").json} == set(catalogue.nodes())


def test_chips_side_by_side_keep_sparse_peaks_apart(cli: Cli) -> None:
    out = cli("hardware", "h100", "h200").out
    assert rows(out)["bf16"].split("  ")[0] == "bf16"
    assert "989 TFLOP/s" in rows(out)["bf16"] and "1.98 PFLOP/s" in rows(out)["bf16 sparse"]
    assert "80.0 GB" in rows(out)["memory"] and "141 GB" in rows(out)["memory"]
    assert "sources, H100 SXM" in out and "sources, H200 SXM" in out


def test_a_chip_as_json_has_prices_and_sources(cli: Cli) -> None:
    (facts,) = cli("hardware", "h100", "--json").json
    assert facts["num_devices"] == 1 and facts["chip"]["sources"]
    assert all(price["chip"] == facts["chip"]["name"] for price in facts["prices"]) and facts["prices"]


def test_a_hardware_string_shows_its_tiers(cli: Cli) -> None:
    out = cli("hardware", "h100x64").out
    assert "8 by NVLink 4" in rows(out)["inside"] and "8 by InfiniBand NDR" in rows(out)["between"]
    assert cli("hardware", "dgx-h200x8", "-q").out.startswith("64 × H200")


def test_here_is_this_machine(cli: Cli) -> None:
    (facts,) = cli("hardware", "here", "--json").json
    assert facts["name"] == "here" and facts["num_devices"] >= 1


def test_a_misspelt_name_gets_the_nearest(cli: Cli) -> None:
    ran = cli("hardware", "h10")
    assert ran.code == 2 and "error: no hardware 'h10'; did you mean h100?" in ran.err


def test_a_count_that_does_not_fill_nodes_is_refused_with_one_that_does(cli: Cli) -> None:
    ran = cli("hardware", "h100x12")
    assert ran.code == 2 and "try h100x8" in ran.err
