"""Tokens to text: stop texts across tokens, ends, and the same text with and without overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.engine.output.output_text import OutputProcessor, StopText
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.step_loop import Loop
from tests.engine.fake import EOS, FakeExecutor, ask, expected, make_scheduler


class Letters:
    """Token 2 is a, 3 is b, …; a capital waits for the letter after it, as a torn character would."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        letter = letters([token])
        text, self._held = self._held + letter, ""
        if letter.isupper():
            text, self._held = text[:-1], letter
        return text

    def finish(self) -> str:
        return self._held


def letters(tokens: list[int]) -> str:
    return "".join("#<abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"[token % 50] for token in tokens)


def cut(text: str, stops: list[str]) -> str:
    """Text before the stop text that is complete first."""
    for end in range(len(text) + 1):
        places = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if places:
            return text[: min(places)]
    return text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_texts_are_found_wherever_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    seen = StopText(stops)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for letter in text[start:end]:
            shown += seen.push(letter)
            assert not any(stop in shown for stop in stops)
    found = cut(text, stops)
    assert seen.stopped is (found != text)
    assert shown + seen.finish() == found


def test_only_what_may_become_a_stop_text_is_held_back() -> None:
    seen = StopText(["END", "\n\n"])
    assert [seen.push(text) for text in ("one\n", "two E", "N", "X", "\n", "\n", "more")] == [
        "one",
        "\ntwo ",
        "",
        "ENX",
        "",
        "",
        "",
    ]
    assert seen.stopped and seen.finish() == ""


def answer(stop: tuple[str, ...], *, overlap: bool, **more: object) -> tuple[str, Sequence]:
    """Text of one request served beside another."""
    scheduler = make_scheduler(num_blocks=40)
    loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4), overlap=overlap, clock=lambda: 0.0)
    answers = OutputProcessor(scheduler, Letters)
    (seq,) = scheduler.submit(ask("a", [2, 3, 4, 5], 20, stop=stop, **more), 0.0)
    scheduler.submit(ask("b", [7, 3, 4], 20), 0.0)
    texts = {"a": "", "b": ""}
    last = {}
    while scheduler.has_work or scheduler.under_way:
        decision, outcome = loop.step()
        for delta in answers.take(decision, outcome, 0.0):
            assert delta.sequence.id not in last, "nothing comes after the last delta"
            texts[delta.sequence.id] += delta.text
            if delta.finish:
                last[delta.sequence.id] = delta.finish
    check_idle(scheduler)
    assert texts["b"] == letters([token for token in expected(ask("b", [7, 3, 4], 20)) if token != EOS])
    assert last == {"a": seq.finish, "b": "length" if len(texts["b"]) == 20 else "stop"}
    return texts["a"], seq


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_ends_before_its_stop_text(overlap: bool) -> None:
    whole = expected(ask("a", [2, 3, 4, 5], 20))
    text = letters(whole)
    for length in (1, 2, 3):
        for start in range(len(whole) - length):
            stop = text[start : start + length]
            shown, seq = answer((stop,), overlap=overlap)
            assert shown == text[: text.find(stop)] and seq.finish == "stop"
            assert text.find(stop) + length <= seq.num_output <= text.find(stop) + length + 1
            assert seq.output == whole[: seq.num_output]


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_texts_do_not_count_before_min_tokens(overlap: bool) -> None:
    whole = letters(expected(ask("a", [2, 3, 4, 5], 20)))
    shown, seq = answer((whole[1],), overlap=overlap, min_tokens=6)
    assert seq.num_output >= 6 and shown.startswith(whole[:5])


def test_an_answer_that_is_given_up_says_so() -> None:
    scheduler = make_scheduler(num_blocks=40)
    loop = Loop(scheduler, FakeExecutor(scheduler.cache, 4), clock=lambda: float(now))
    answers = OutputProcessor(scheduler, Letters)
    (seq,) = scheduler.submit(ask("a", [2, 3, 4, 5], 20, timeout_s=3.0), 0.0)
    deltas = []
    for now in range(6):
        deltas += answers.take(*loop.step(), float(now))
    assert [delta.finish for delta in deltas][-1] == "deadline" and sum(p.finish is not None for p in deltas) == 1
    assert seq.num_output == len(deltas) - 1
    assert [delta.gap_s for delta in deltas] == [None, 1.0, None]
    other = scheduler.submit(ask("b", [2, 3], 20), 9.0)
    (delta,) = answers.end(scheduler.abort("b", 9.0))
    assert delta.sequence is other[0] and delta.finish == "abort" and delta.text == ""
