"""Prompts that begin like earlier ones are known by number and length, whether or not anything is cached."""

from __future__ import annotations

import pytest

from armillary.engine.cache.prefix_reuse_stats import PrefixReuse
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.telemetry.gauges import request_gauges, step_gauges
from tests.engine.fake import ask, make_scheduler, run

TEXT = list(range(2, 26))


def submit(scheduler: Scheduler, name: str, prompt: list[int], tokens: int = 4) -> Sequence:
    (seq,) = scheduler.submit(ask(name, prompt, tokens), 0.0)
    return seq


@pytest.mark.parametrize("prefix", [True, False])
def test_what_was_there_before_is_counted_in_whole_blocks(prefix: bool) -> None:
    scheduler = make_scheduler(num_blocks=40, prefix=prefix)
    prompts = (TEXT, TEXT[:10] + [40] * 8, [9] * 20, TEXT, TEXT[:8] + [40] * 9)
    made = [submit(scheduler, name, prompt) for name, prompt in zip("abcde", prompts, strict=True)]
    assert [seq.number for seq in made] == [1, 2, 3, 4, 5]
    # the last block of a prompt that is there whole is computed again for its last token; blocks hold 4 tokens
    assert [(seq.shared_prefix, seq.prefix_source) for seq in made] == [(0, 0), (8, 1), (0, 0), (20, 1), (8, 4)]


def test_answers_are_part_of_what_may_be_repeated() -> None:
    scheduler = make_scheduler(num_blocks=40, prefix=False)
    found = run(scheduler, [ask("a", TEXT[:6], 14, min_tokens=14)])
    later = submit(scheduler, "b", TEXT[:6] + found["a"] + [30] * 5)
    assert (later.shared_prefix, later.prefix_source) == (20, 1)


def test_another_salt_repeats_nothing() -> None:
    scheduler = make_scheduler(num_blocks=40)
    submit(scheduler, "a", TEXT)
    (seq,) = scheduler.submit(ask("b", TEXT, salt="another"), 0.0)
    assert (seq.shared_prefix, seq.prefix_source) == (0, 0)


def test_what_is_remembered_is_bounded() -> None:
    scheduler, few = make_scheduler(num_blocks=40), PrefixReuse(capacity=8)
    scheduler.request_table.prefix_reuse = few
    for i in range(20):
        submit(scheduler, f"r{i}", [2 + i] * 24)
    assert sum(len(part) for kept in (few._young, few._old) for part in kept.parts) <= 2 * (8 + 6)
    assert submit(scheduler, "last", [21] * 24).shared_prefix == 20
    assert submit(scheduler, "first", [2] * 24).shared_prefix == 0


def test_records_say_what_was_repeated_and_what_was_found() -> None:
    scheduler = make_scheduler(num_blocks=40, prefix=False)
    run(scheduler, [ask("a", TEXT, 3)])
    (seq,) = scheduler.submit(ask("b", TEXT, 3), 0.0)
    decision = scheduler.schedule(1.0)
    gauges = step_gauges(scheduler, decision)
    assert (gauges["prefix_repeated_total"], gauges["prefix_hits_total"]) == (20, 0)
    assert gauges["prefill_pairs"] == sum(range(1, 1 + gauges["prefill_tokens"]))
    assert {"repeated_tokens": 20, "prefix_source_request": 1, "request_number": 2}.items() <= request_gauges(
        seq
    ).items()


def test_with_nothing_remembered_requests_are_only_numbered() -> None:
    scheduler = make_scheduler(num_blocks=40, prefix=False)
    scheduler.request_table.prefix_reuse = PrefixReuse(capacity=0)
    first, again = submit(scheduler, "a", TEXT), submit(scheduler, "b", TEXT)
    assert (first.number, again.number) == (1, 2)
    assert (again.shared_prefix, again.prefix_source, again.chain.digests) == (0, 0, [])
