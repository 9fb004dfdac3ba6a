"""The page: whole, alone, and safe with the names that kernels have."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from armillary.profiling.analysis.compare import compare
from armillary.profiling.profile import Profile, Roofline
from armillary.profiling.report.profile_page import page, write_page
from armillary.profiling.report.profile_text import amdahl_cells, budget_line, memory_line
from tests.profiling.profiles import made_profile


class Tags(HTMLParser):
    """Checks that what is opened is closed, and counts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def test_it_is_whole_and_loads_nothing() -> None:
    text = page(made_profile())
    tags = Tags(text)
    assert tags.open == [] and "$" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert tags.seen.count("section") == 9
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "http" not in text and "url(" not in text


def test_it_shows_every_part() -> None:
    text = page(made_profile())
    for expected in (
        "launch gaps <b>26.0%</b>",
        "train.py:88",
        "peak 5.00 GB",
        "bf16 800 TFLOP/s",
        "blocks.0.mlp",
        "75 %",
        "registers: 232",
        "without the profiler",
    ):
        assert expected in text, expected
    wide, narrow = text.split("class='on-narrow'", 1)
    for drawing in (wide, narrow):
        assert drawing.count("class='point'") == 3  # a copy has no FLOPs, so no place under the roofline


def test_names_cannot_break_out() -> None:
    row = made_profile().rows[0]
    nasty = "<script>alert(1)</script>'\"&"
    changed = type(row)(**{**vars(row), "name": nasty, "module": nasty})
    text = page(made_profile(source=nasty, rows=(changed,), findings=(nasty,), notes=(nasty,)))
    assert Tags(text).open == []
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize(
    "found",
    [
        made_profile(rows=(), gaps=(), memory=None, findings=(), notes=()),
        made_profile(roofline=Roofline(device="unknown")),
        made_profile(roofline=Roofline(device="odd", bytes_per_s=1e12)),
        made_profile(wall_s=0.0, budget={}),
    ],
)
def test_what_is_not_known_is_left_out(found: Profile) -> None:
    assert Tags(page(found)).open == []


def test_it_is_written(tmp_path: Path) -> None:
    assert write_page(made_profile(), tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# --- words and points that it shares with the terminal


def test_the_budget_in_a_line() -> None:
    assert budget_line(made_profile()) == (
        "step 100 ms = useful 28 % + inefficient kernels 18 % + launch gaps 26 % + host 23 % + sync and copies 4 % "
        "+ unknown 1 %"
    )


def test_memory_in_a_line() -> None:
    assert memory_line(made_profile()) == (
        "memory peak 5.00 GB, most of it activations (3.00 GB); blocks.0.mlp holds 1.20 GB"
    )


def test_amdahl_is_in_words() -> None:
    cells = {name: rest for name, *rest in amdahl_cells(made_profile())}
    assert cells["launch gaps"] == ["26.0 %", "1.15 ×", "1.35 ×"]
    assert "unknown" not in cells and "gemm" in cells


def test_a_comparison_is_on_the_page() -> None:
    faster = made_profile(wall_s=0.1, budget={"useful": 0.1})
    text = page(faster, compare(made_profile(), faster))
    assert "Against train.py: 2.00 × as fast" in text and Tags(text).open == []
