"""Token counts are read however a response is cut into parts, and a hidden event leaves the others as they are."""

from __future__ import annotations

import json
import random

import pytest

from armillary.fleet.gateway.token_usage import TokenUsage, UsageReader

COUNTS = {"prompt_tokens": 7, "completion_tokens": 2}
EVENTS = [
    {"choices": [{"delta": {"content": 'a "usage":{ in text'}}], "usage": None},
    {"choices": [{"delta": {"content": "b"}}]},
]


def stream(line: str) -> tuple[bytes, bytes]:
    """(what a client shall see, what the replica sends)."""
    shown = "".join(f"data: {json.dumps(event)}{line}{line}" for event in EVENTS)
    last = f"data: {json.dumps({'choices': [], 'usage': COUNTS})}{line}{line}"
    end = f"data: [DONE]{line}{line}"
    return (shown + end).encode(), (shown + last + end).encode()


@pytest.mark.parametrize("line", ["\n", "\r\n"])
@pytest.mark.parametrize("cut", [1, 3, 17, 10_000])
def test_a_stream_cut_anywhere(line: str, cut: int) -> None:
    shown, sent = stream(line)
    parts = [sent[start : start + cut] for start in range(0, len(sent), cut)]
    hidden, open_ = UsageReader(stream=True, hidden=True), UsageReader(stream=True, hidden=False)
    assert b"".join(hidden.feed(part) for part in parts) + hidden.rest() == shown
    assert b"".join(open_.feed(part) for part in parts) + open_.rest() == sent
    assert hidden.usage() == open_.usage() == TokenUsage(7, 2)


def test_complete_events_are_not_held_back() -> None:
    reader = UsageReader(stream=True, hidden=True)
    event = b"data: {}\n\n"
    assert reader.feed(event) == event and reader.feed(event + b"data: ") == event and reader.rest() == b"data: "


def test_counts_of_complete_responses() -> None:
    rng = random.Random(0)
    for table, counts in (
        ({"choices": [], "usage": COUNTS}, TokenUsage(7, 2)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}, "content": []}, TokenUsage(3, 4)),
        ({"data": [rng.random() for _ in range(20_000)], "usage": {"prompt_tokens": 9}}, TokenUsage(9, 0)),
        ({"data": ["usage"]}, None),
        ({"usage": None}, None),
    ):
        reader, data = UsageReader(stream=False, hidden=False), json.dumps(table).encode()
        for start in range(0, len(data), 50_000):
            reader.feed(data[start : start + 50_000])
        assert reader.usage() == counts


def test_counts_of_other_streams_stay_in_the_stream() -> None:
    """Anthropic's counts the prompt first and the completion last, OpenAI's responses at the end, after all text."""
    start = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"cache_read_input_tokens":1}}}\n\n'
    text = b'data: {"delta":{"text":"x"}}\n\n' * 500
    end = b'data: {"type":"message_delta","usage":{"output_tokens":4}}\n\ndata: {"type":"message_stop"}\n\n'
    reader = UsageReader(stream=True, hidden=False)
    assert b"".join(map(reader.feed, (start, text, end))) == start + text + end
    assert reader.usage() == TokenUsage(10, 4)
    done = {"response": {"output": "x" * 9000, "usage": {"input_tokens": 3, "output_tokens": 2}}}
    reader = UsageReader(stream=True, hidden=False)
    reader.feed(b"data: " + json.dumps(done).encode() + b"\n\n")
    assert reader.usage() == TokenUsage(3, 2)
