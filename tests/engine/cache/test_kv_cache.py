"""Tables of blocks: growing, sharing, copying on write, windows; with a dozen blocks and no model."""

from __future__ import annotations

import pytest

from armillary.engine.cache.kv_cache import Copy
from armillary.engine.cache.layer_groups import Group
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.invariants import Broken, check, check_idle
from armillary.engine.scheduler.scheduler import Scheduler
from tests.engine.fake import ask, expected, make_scheduler, run


def step(scheduler: Scheduler, *tokens: int) -> None:
    """Decide a step and give it these tokens."""
    decision = scheduler.schedule(0.0)
    scheduler.update(decision, tokens, 0.0)


def start(scheduler: Scheduler, name: str, prompt: list[int], most: int = 8, **more: object) -> Sequence:
    return scheduler.submit(ask(name, prompt, most, **more), 0.0)[0]


def test_a_sequence_takes_a_block_when_it_needs_one() -> None:
    scheduler = make_scheduler(num_blocks=5)
    seq = start(scheduler, "a", [2, 3, 4, 5, 6, 7])
    step(scheduler, 9)
    assert len(seq.tables[0]) == 2 and scheduler.cache.pool.num_used == 2
    step(scheduler, 9)
    step(scheduler, 9)  # tokens 6 and 7 fill the second block
    assert len(seq.tables[0]) == 2
    decision = scheduler.schedule(0.0)
    assert [(edit.row, edit.first, edit.blocks) for edit in decision.table_updates] == [
        (seq.row, 2, [seq.tables[0][2]])
    ]


def test_where_there_are_plenty_blocks_are_taken_ahead_and_never_by_all_at_once() -> None:
    scheduler = make_scheduler(num_blocks=64, max_running=8, max_tokens_per_step=32)
    made = [start(scheduler, f"r{i}", [2, 3, 4, 5], 20) for i in range(8)]
    step(scheduler, *[9] * 8)
    grown = []
    for _ in range(12):
        decision = scheduler.schedule(0.0)
        scheduler.update(decision, [9] * 8, 0.0)
        grown.append(len(decision.table_updates))
    assert sum(grown) >= 3 * 8 and max(grown[2:]) <= 4, grown
    assert all(seq.computed <= seq.num_writable <= seq.computed + 8 for seq in made)


def test_an_answer_gives_its_blocks_back_and_they_can_be_found_again() -> None:
    scheduler = make_scheduler(num_blocks=11)
    start(scheduler, "a", [2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    step(scheduler, 9)
    assert scheduler.cache.pool.num_used == 0 and len(scheduler.cache.prefix_cache) == 2
    again = start(scheduler, "b", [2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    decision = scheduler.schedule(0.0)
    assert again.cached_tokens == 8 and decision.num_tokens == 1 and decision.positions == [8]


def test_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        seq = start(scheduler, name, [2, 3, 4, 5, 6, 7, 8, 9], 1)
        step(scheduler, 9)
    assert seq.cached_tokens == 4


def test_a_fork_shares_full_blocks_and_copies_the_one_that_both_write() -> None:
    scheduler = make_scheduler(num_blocks=11)
    leader, fork = scheduler.submit(ask("a", [2, 3, 4, 5, 6, 7], n=2), 0.0)
    step(scheduler, 20)
    decision = scheduler.schedule(0.0)
    assert fork.tables[0][0] == leader.tables[0][0] and fork.tables[0][1] != leader.tables[0][1]
    assert len(decision.copies) == 1 and decision.copies[0].target in (leader.tables[0][1], fork.tables[0][1])
    assert decision.positions == [6, 5]  # the fork computes the last token of the prompt for itself
    scheduler.update(decision, (21, 22), 0.0)
    assert leader.output == [20, 21] and fork.output == [22]
    step(scheduler, 23, 24)
    assert scheduler.schedule(0.0).copies == []


def test_the_last_holder_of_a_shared_block_writes_into_it_but_not_under_its_old_name() -> None:
    # the leader fills and names the block of the prompt's end, finishes, and only then the fork gets a row
    scheduler = make_scheduler(num_blocks=11, max_running=2)
    other = start(scheduler, "other", [30], 40)
    leader, fork = scheduler.submit(ask("a", [2, 3, 4, 5, 6, 7], 12, n=2), 0.0)
    for _ in range(5):
        step(scheduler, 20, 20)
    assert leader.computed > 8 and fork.row < 0
    scheduler.abort("other", 0.0)
    assert other.finish == "abort"
    decision = scheduler.schedule(0.0)
    assert decision.copies == [Copy(leader.tables[0][1], fork.tables[0][1])]
    scheduler.update(decision, (20, 20), 0.0)
    scheduler.abort("a", 0.0)
    check_idle(scheduler)


def test_forks_whose_leader_is_gone_compute_the_prompt_themselves() -> None:
    scheduler = make_scheduler(prefix=False, max_running=1)
    request = ask("a", [2, 3, 4, 5, 6], 3, n=3)
    answers = run(scheduler, [request])
    assert [answers[f"a/{i}"] for i in range(3)] == [expected(request, i) for i in range(3)]


def test_a_fork_waits_until_what_it_shares_was_computed_by_an_earlier_step() -> None:
    # the leader is put back and starts again beside its fork: the copy would be made before the prompt is computed
    scheduler = make_scheduler(num_blocks=4, block_tokens=2, max_tokens_per_step=4, prefix=False, reserve=0.0)
    first, second = ask("a", [2, 2, 2, 2], 4), ask("b", [2, 2], 2, n=2)
    answers = run(scheduler, [first, second])
    assert scheduler.totals.preempted and answers["a"] == expected(first)
    assert [answers[f"b/{i}"] for i in range(2)] == [expected(second, i) for i in range(2)]


def test_a_windowed_group_gives_back_what_no_query_sees_any_more() -> None:
    scheduler = make_scheduler(num_blocks=11, groups=(Group(sees="window", reach=6),), prefix=False)
    seq = start(scheduler, "a", [2, 3, 4, 5, 6], 40)
    for _ in range(30):
        step(scheduler, 20)
        assert seq.num_blocks <= 4  # the window, and one ahead
    assert seq.tables[0][:5] == [0] * 5 and all(seq.tables[0][-2:])


def test_a_windowed_model_serves_more_tokens_than_its_cache_holds() -> None:
    request = ask("a", [2, 3, 4, 5, 6], 58)
    groups = (Group(sees="window", reach=6),)
    scheduler = make_scheduler(num_blocks=7, groups=groups)
    assert run(scheduler, [request])["a"] == expected(request, groups=groups)


def test_a_prefix_of_a_mixed_model_is_found_where_the_window_before_its_end_is_cached() -> None:
    groups = (Group(), Group(sees="window", reach=5))
    scheduler = make_scheduler(num_blocks=24, groups=groups, max_tokens_per_step=40)
    prompt = list(range(2, 22))
    start(scheduler, "a", prompt, 1)
    step(scheduler, 30)
    again = start(scheduler, "b", prompt, 1)
    step(scheduler, 30)
    assert again.cached_tokens == 16 and again.miss == "partial"
    names = scheduler.cache.prefix_cache
    # the window at the end is gone: the prefix before it counts
    names.forget(names.by_digest[1].get(again.chain.digests[3]))
    third = start(scheduler, "c", prompt, 1)
    step(scheduler, 30)
    assert third.cached_tokens == 12
    check_idle(scheduler)


def test_a_long_table_is_given_back_in_slices() -> None:
    scheduler = make_scheduler(
        num_blocks=700, block_tokens=1, max_model_len=700, max_tokens_per_step=700, lookups=50, prefix=False
    )
    start(scheduler, "a", [2] * 600, 1)
    step(scheduler, 9)
    assert scheduler.cache.pool.num_used == 600 and scheduler.cache.available == 700
    scheduler.schedule(0.0)
    assert scheduler.cache.pool.num_used == 550
    seq = start(scheduler, "b", [3] * 690, 1)  # what it needs is freed at once
    scheduler.update(scheduler.under_way[0], (), 0.0)
    assert scheduler.schedule(0.0).num_tokens == 690 and seq.num_blocks == 690
    check(scheduler)


def test_a_long_prefix_is_searched_over_several_steps() -> None:
    scheduler = make_scheduler(num_blocks=40, block_tokens=1, max_tokens_per_step=40, lookups=10)
    for name in "ab":
        seq = start(scheduler, name, list(range(2, 37)), 1)
        steps = 0
        while seq.finish is None:
            decision = scheduler.schedule(0.0)
            scheduler.update(decision, [9] * len(decision.sampling), 0.0)
            steps += 1
    assert steps == 4 and seq.cached_tokens == 34 and seq.miss == "partial"


@pytest.mark.parametrize("spoil", ["refs", "free", "name", "row", "table", "count"])
def test_the_checker_sees(spoil: str) -> None:
    scheduler = make_scheduler(num_blocks=11, check_every=0)
    seq = start(scheduler, "a", [2, 3, 4, 5, 6, 7], 20)
    start(scheduler, "b", [2, 3, 4, 5, 6, 8], 20)
    step(scheduler, 9, 9)
    step(scheduler, 9, 9)
    check(scheduler)
    pool = scheduler.cache.pool
    if spoil == "refs":
        pool.refs[seq.tables[0][0]] += 1
    elif spoil == "free":
        pool.num_free += 1
    elif spoil == "name":
        scheduler.cache.prefix_cache.chunks[seq.tables[0][0]] = b"else"
    elif spoil == "row":
        scheduler.request_table.rows.pop()
    elif spoil == "table":
        seq.tables[0].pop()
    else:
        seq.computed = 30
    with pytest.raises(Broken):
        check(scheduler)
