"""Events however the bytes are cut, and what they say."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from armillary.serving.load.client import EventStream, StreamedResponse, error_text

STREAM = b": a comment\r\nevent: x\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\n\n\ndata: [DONE]"


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    stream, found = EventStream(), []
    for begin, end in pairwise(edges):
        found += stream.feed(STREAM[begin:end])
    assert found + stream.close() == [b"one", b"two\nlines", b"[DONE]"]


def pieces(*events: object) -> StreamedResponse:
    found = StreamedResponse()
    for i, event in enumerate(events):
        found.add(event if isinstance(event, bytes) else json.dumps(event).encode(), float(i))
    return found


def test_only_text_is_stamped() -> None:
    found = pieces(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"reasoning_content": "b"}}]},
        {"choices": [{"text": "c"}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
    )
    assert found.stamps == [1.0, 2.0, 3.0] and found.finished
    assert (found.tokens_in, found.tokens_out) == (7, 3)


def test_errors_are_told() -> None:
    assert pieces({"error": {"message": "engine\ndied"}}).error == "engine died"
    assert "not JSON" in pieces(b"{oops").error and "not an object" in pieces(b"[1]").error
    assert error_text({"detail": "no such route"}) == "no such route" and error_text("gone") == "gone"


EVENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "text", "usage", "prompt_tokens", "error", "finish_reason"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@given(EVENTS)
def test_any_event_is_survived(event: object) -> None:
    found = pieces(event)
    assert found.tokens_in is None or isinstance(found.tokens_in, int)
