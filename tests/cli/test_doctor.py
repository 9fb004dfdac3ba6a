"""`armillary doctor`: what this machine has and lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Cli = Callable[..., Any]


def test_people_see_the_machine_the_checks_and_what_limits_it(cli: Cli) -> None:
    ran = cli("doctor")
    assert ran.code == 0
    for word in ("this machine", "CPU", "torch", "disk", "Hugging Face Hub"):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


def test_programs_see_all_of_it(cli: Cli) -> None:
    facts = cli("doctor", "--json").json
    assert facts["machine"]["cpu"]["usable"] >= 1
    assert {check["state"] for check in facts["checks"]} <= {"ok", "warn", "missing"}
    assert {check["name"] for check in facts["checks"]} >= {"python", "torch", "memory", "disk"}


def test_quiet_is_a_line_a_check(cli: Cli) -> None:
    lines = cli("doctor", "-q").out.splitlines()
    assert lines[0].startswith("ok python: ")
