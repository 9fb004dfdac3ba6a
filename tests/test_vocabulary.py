"""Private words that the code has left behind: none comes back as an identifier, a file name or a gauge."""

from __future__ import annotations

import io
import tokenize
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


def identifiers(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_no_identifier_or_file_has_a_private_name() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    used = {str(path.relative_to(PACKAGE)): sorted((identifiers(path) | {path.stem}) & GONE) for path in files}
    assert {name: words for name, words in used.items() if words} == {}


def test_no_gauge_has_a_former_name() -> None:
    assert set(FORMER_GAUGES).isdisjoint(GAUGES)
