"""Private words that the code has left behind: none comes back as an identifier, a file name or a gauge."""

from __future__ import annotations

import re
from pathlib import Path

from armillary.spec.gauges import GAUGES

PACKAGE = Path(__file__).parent.parent / "armillary"

GONE = frozenset(
    [
        "Again",
        "turn",
        "Turn",
        "turned",
        "turn_a",
        "turn_kernel",
        "TURNS",
        "Looks",
        "Pace",
        "pace",
        "come",
        "Samples",
        "JoinedRows",
        "Course",
        "look_ahead",
        "Roster",
        "roster",
        "put_back",
        "Upkeep",
        "upkeep",
        "closely",
        "stale",
        "edits",
        "distrust",
        "make_room",
        "Wish",
        "wish",
        "wish_of",
        "Answering",
        "answering",
        "answer_room",
        "Exchange",
        "Door",
        "door",
        "to_whom_it_concerns",
        "old_objects_at_rest",
        "rehearse",
        "rehearsed",
        "rehearsal",
        "Repeats",
        "Lane",
        "Kept",
        "Held",
        "Trip",
        "trip",
        "meetings",
        "Passing",
        "become",
        "Products",
        "roof",
        "Roof",
        "How",
        "Project",
        "Moment",
        "flying",
        "Question",
        "question",
        "Scatter",
        "_dice",
        "_Belief",
        "dear",
        "beyond_rows",
        "_at_this_pace",
        "Circle",
        "circle",
        "Walk",
        "promise",
        "settle",
        "a_micro_batch",
        "STANDS_BY_LEVER",
        "GENERAL",
        "HEAVY",
        "NEARLY",
        "CALM",
        "ASKS",
        "WASTED",
        "Orders",
        "Outlet",
        "outlet",
        "Desk",
        "desk",
        "Trials",
        "Knowing",
        "Trying",
        "one",
        "made",
        "mine",
        "Turns",
        "turns",
        "leave",
        "writable",
        "_make_room",
        "Late",
        "Chunk",
        "Finish",
        "dice",
        "launching",
        "whole",
        "Start",
        "Started",
        "starting_point",
        "start_model",
        "Judged",
        "judge",
        "looks",
        "aside",
        "together",
        "behind",
        "tell",
        "far",
        "exchange",
        "lane",
        "stands",
        "orders",
        "trials",
        "can_join",
        "tail_s",
        "due",
        "named",
        "reached",
        "hold",
        "products",
        "moments",
        "walk",
        "found",
        "others",
        "NoMeter",
        "PASSES",
        "Piece",
        "again",
        "beside",
        "room",
        "settled",
        "late",
        "_door",
        "_turn",
        "Feed",
        "Kind",
        "pairs",
        "like",
        "steady",
        "every",
        "held",
        "kept",
    ]
)
"""names that meant something only here; what to say instead is in docs/glossary.md or the field's own word"""

FORMER_GAUGES = (
    "rehearsed_s",
    "micro_batch_fraction",
    "call_s",
    "short_kernels_fraction",
    "roof_fraction",
    "repeats_request",
    "inefficiency_fraction",
)


_NO_CODE = re.compile(r'''#[^\n]*|("""|\'{3})(?:\\.|.)*?\1|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*\'''', re.DOTALL)
"""comments and strings; tokenize finds the same in many times the time"""


def identifiers(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w*", _NO_CODE.sub(" ", text)))


def test_no_identifier_or_file_has_a_private_name() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    used = {
        str(path.relative_to(PACKAGE)): sorted((identifiers(path.read_text(encoding="utf-8")) | {path.stem}) & GONE)
        for path in files
    }
    assert {name: words for name, words in used.items() if words} == {}


def test_identifiers_are_the_words_outside_of_strings_and_comments() -> None:
    text = '''x = "it's" + 'say "y"'  # z isn\'t "one\nn = """a "b" c\\""" d""" + r"e\\\\" + o\n'''
    assert identifiers(text) == {"x", "n", "r", "o"}


def test_no_gauge_has_a_former_name() -> None:
    assert set(FORMER_GAUGES).isdisjoint(GAUGES)
