"""Steps decided by hand-made inputs: what goes first, what waits, what is put back, and what tokens mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from armillary.engine.request.constraint import Structure
from armillary.engine.request.sequence import Sequence, State
from armillary.engine.scheduler.decision import Decision, Outcome
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.prefill_budget import chunk_cost
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings
from armillary.errors import BadInput
from armillary.spec.tables.serve import Serve
from tests.engine.fake import EOS, ask, expected, make_scheduler, run

Start = Callable[..., Sequence]


def step(scheduler: Scheduler, token: int = 9, now: float = 0.0) -> tuple[Decision, Outcome]:
    """A step in which every sequence draws `token`."""
    decision = scheduler.schedule(now)
    return decision, scheduler.update(decision, [token] * len(decision.sampling), now)


def start(
    scheduler: Scheduler, name: str, length: int = 3, most: int = 8, now: float = 0.0, **more: object
) -> Sequence:
    """A request whose prompt is like no other's."""
    prompt = [2 + (7 * ord(name[0]) + 3 * i) % 40 for i in range(length)]
    return scheduler.submit(ask(name, prompt, most, **more), now)[0]


def sizes(decision: Decision) -> dict[str, int]:
    return {chunk.sequence.id: chunk.size for chunk in decision.chunks}


# --- one step


def test_decodes_go_first_and_prompts_fill_the_rest() -> None:
    scheduler = make_scheduler(num_blocks=30, max_tokens_per_step=8)
    a, b = start(scheduler, "a"), start(scheduler, "b")
    step(scheduler)
    start(scheduler, "c", 20)
    decision, _ = step(scheduler)
    assert decision.decodes == [a, b] and sizes(decision) == {"c": 4}  # six are left; a chunk ends on a block
    assert decision.num_tokens <= 8 and "2 decodes · c 0…4" in decision.text()
    assert sizes(step(scheduler)[0]) == {"c": 4}


def test_a_prompt_in_parts_draws_its_token_with_the_last() -> None:
    scheduler = make_scheduler(max_tokens_per_step=8)
    seq = start(scheduler, "a", 19)
    parts = [scheduler.schedule(0.0).chunks[0] for _ in range(1)]
    scheduler.update(scheduler.under_way[0], (), 0.0)
    while not seq.num_output:
        decision, _ = step(scheduler)
        parts += decision.chunks
    assert [(part.start, part.size, part.samples) for part in parts] == [(0, 8, False), (8, 8, False), (16, 3, True)]


@pytest.mark.parametrize("prefix", [False, True])
def test_a_last_token_left_alone_still_ends_the_prompt(prefix: bool) -> None:
    scheduler = make_scheduler(num_blocks=30, max_tokens_per_step=8, prefix=prefix)
    leader, fork = scheduler.submit(ask("a", list(range(2, 11)), n=2), 0.0)
    assert sizes(step(scheduler)[0]) == {"a/0": 8}
    decision, _ = step(scheduler, now=2.0)
    assert decision.decodes == decision.prefill_done == [leader] and leader.first_token_at == 2.0
    assert step(scheduler)[0].decodes == [leader, fork]


def test_prompts_take_no_more_than_their_share_while_others_decode() -> None:
    scheduler = make_scheduler(num_blocks=30, max_tokens_per_step=16, prefill_tokens=4)
    start(scheduler, "a", 30)
    assert sizes(step(scheduler)[0]) == {"a": 16}  # nobody decodes
    assert sizes(step(scheduler)[0]) == {"a": 14}
    start(scheduler, "b", 30)
    assert sizes(step(scheduler)[0]) == {"b": 4}


def test_one_long_prompt_lets_short_ones_pass() -> None:
    scheduler = make_scheduler(num_blocks=40, max_tokens_per_step=16, max_chunk=8)
    start(scheduler, "long", 40)
    short = start(scheduler, "short", 5)
    assert sizes(step(scheduler)[0]) == {"long": 8, "short": 5} and short.num_output == 1


def test_later_chunks_are_smaller_where_attention_counts() -> None:
    scheduler = make_scheduler(num_blocks=200, max_model_len=700, max_tokens_per_step=64, attention_tokens=100.0)
    start(scheduler, "a", 600, 1)
    parts = []
    while scheduler.has_work:
        parts += step(scheduler)[0].chunks
    assert parts[0].size > 3 * parts[-2].size
    costs = [chunk_cost(part.size, part.start, 100.0) for part in parts[:-1]]
    assert min(costs) > 64 / 2 and max(costs) <= 64  # even but for whole blocks, which cost up to 28 at the end


# --- queues


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_running=1, num_blocks=30, ageing_s=0.0)
    made = [start(scheduler, name, now=float(i), priority=-i) for i, name in enumerate("abc")]
    over = []
    while scheduler.has_work:
        over += step(scheduler)[1].finished
    assert over == made


def test_priority_counts_without_any_setting() -> None:
    assert Serve().ageing_s == Settings(max_model_len=1, vocab=1).ageing_s > 0
    scheduler = make_scheduler(max_running=1, num_blocks=30)
    made = [start(scheduler, name, now=float(i), priority=-i) for i, name in enumerate("abc")]
    over = []
    while scheduler.has_work:
        over += step(scheduler)[1].finished
    assert over == made[::-1]


def test_priority_goes_first_but_buys_only_so_much_time() -> None:
    scheduler = make_scheduler(max_running=1, num_blocks=30, ageing_s=10.0)
    running = start(scheduler, "r")
    step(scheduler)
    low = start(scheduler, "low", now=0.0, priority=1)
    high = start(scheduler, "high", now=5.0)
    late = start(scheduler, "x", now=11.0)
    over = []
    while scheduler.has_work:
        over += step(scheduler, now=12.0)[1].finished
    assert over == [running, high, low, late]


def test_nobody_starves_under_a_stream_of_urgent_requests() -> None:
    scheduler = make_scheduler(max_running=1, num_blocks=30, ageing_s=10.0)
    low = start(scheduler, "low", most=1, priority=5)
    for now in range(200):
        start(scheduler, f"u{now}", most=1, now=float(now))
        step(scheduler, now=float(now))
        if low.finish:
            break
    assert 40 <= now <= 60


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=12, reserve=1.0)
    start(scheduler, "a", 20, 8)
    big = start(scheduler, "b", 30, 8)
    small = start(scheduler, "c", 2, 2)
    step(scheduler)
    assert big.state is small.state is State.WAITING
    while big.state is State.WAITING:
        step(scheduler)
    assert scheduler.totals.preempted == 0


def test_the_queue_has_an_end() -> None:
    scheduler = make_scheduler(max_waiting=2)
    start(scheduler, "a")
    start(scheduler, "b")
    with pytest.raises(BadInput, match="2 requests are waiting, as many as may; try again later"):
        start(scheduler, "c")
    assert scheduler.totals.rejected == 1
    step(scheduler)
    start(scheduler, "c")


# --- too few blocks


def test_the_youngest_is_put_back_and_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=6, reserve=0.0)
    old, young = start(scheduler, "a", 8, 12), start(scheduler, "b", 8, 12)
    while not scheduler.totals.preempted:
        decision, _ = step(scheduler)
    assert decision.preempted == [young] and old in decision.decodes and young.state is State.WAITING
    kept = list(young.tokens)
    while young.state is State.WAITING:
        step(scheduler)
    assert young.tokens[: len(kept)] == kept and old.finish == "length"
    assert scheduler.totals.recomputed and young.preemptions == 1


def test_everyone_finishes_in_a_cache_for_hardly_more_than_one() -> None:
    made = [ask(f"r{i}", [2 + i, 3, 4, 5, 6], 40) for i in range(8)]
    scheduler = make_scheduler(num_blocks=12, max_running=8, reserve=0.0, prefix=False)
    answers = run(scheduler, made, most_steps=2000)
    assert all(answers[request.id] == expected(request) for request in made)


def test_keeping_blocks_free_avoids_preemption() -> None:
    made = [ask(f"r{i}", [2 + i, 3, 4, 5, 6], 30, min_tokens=30) for i in range(12)]
    preempted = {}
    for reserve in (0.0, None, 1.0):
        scheduler = make_scheduler(num_blocks=24, max_running=8, reserve=reserve)
        run(scheduler, made)
        preempted[reserve] = scheduler.totals.preempted
    assert preempted[1.0] == 0 and preempted[None] < preempted[0.0]


def test_what_is_computed_again_does_not_count_as_a_prefix_hit() -> None:
    scheduler = make_scheduler(num_blocks=6, reserve=0.0)
    start(scheduler, "a", 8, 12)
    start(scheduler, "b", 8, 12)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.totals.preempted and scheduler.totals.hits == 0 and scheduler.totals.looked_up == 16


# --- endings


@pytest.mark.parametrize("overlap", [False, True])
def test_ends(overlap: bool) -> None:
    scheduler = make_scheduler(num_blocks=30)
    given = {"plain": {}, "least": {"min_tokens": 3}, "ignore": {"ignore_eos": True}, "own": {"stop_ids": (7,)}}
    made = {name: start(scheduler, name, **more) for name, more in given.items()}
    tokens = iter((5, EOS, 7, 7, EOS, 6, 6, 6, 6, 6))
    while scheduler.has_work:
        decision = scheduler.schedule(0.0)
        while len(scheduler.under_way) > overlap or (decision.empty and scheduler.under_way):
            first = scheduler.under_way[0]
            scheduler.update(first, [next(tokens)] * len(first.sampling), 0.0)
    assert {name: (seq.finish, seq.num_output) for name, seq in made.items()} == {
        "plain": ("stop", 2),
        "least": ("stop", 5),
        "ignore": ("length", 8),
        "own": ("stop", 2),
    }
    check_idle(scheduler)


def test_a_late_end_costs_one_token_and_an_end_by_length_none() -> None:
    scheduler = make_scheduler(num_blocks=30)
    request = ask("a", [2, 3, 4], 6, ignore_eos=True)
    run(scheduler, [request], overlap=True)
    assert scheduler.totals.discarded == 0
    seq = start(scheduler, "b")
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert second.decodes == [seq] and seq.num_pending == 2
    assert scheduler.update(first, [EOS], 0.0).finished == [seq]
    assert scheduler.update(second, [5], 0.0) == Outcome([], [], [])
    assert seq.output == [EOS] and scheduler.totals.discarded == 1
    check_idle(scheduler)


def test_no_more_than_one_decision_is_ahead_and_they_come_back_in_order() -> None:
    scheduler = make_scheduler()
    start(scheduler, "a")
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="the oldest step first"):
        scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="in the order"):
        scheduler.update(second, [5], 0.0)
    with pytest.raises(AssertionError, match="2 tokens for 1 sequences"):
        scheduler.update(first, [5, 6], 0.0)


@pytest.mark.parametrize("when", ["waiting", "running", "under way", "put back"])
def test_abort(when: str) -> None:
    scheduler = make_scheduler(num_blocks=6, reserve=0.0)
    start(scheduler, "a", 8, 12)
    seq = start(scheduler, "b", 8, 12, n=2)
    if when == "running":
        step(scheduler)
    elif when == "under way":
        step(scheduler)
        scheduler.schedule(0.0)
    elif when == "put back":
        while not seq.preemptions:
            step(scheduler)
    ended = scheduler.abort("b", 3.0)
    assert [other.finish for other in ended] == ["abort", "abort"] and seq.finished_at == 3.0
    assert scheduler.abort("b", 4.0) == [] and "b" not in scheduler.request_table.requests
    while scheduler.has_work or scheduler.under_way:
        if scheduler.under_way:
            decision = scheduler.under_way[0]
            scheduler.update(decision, [9] * len(decision.sampling), 0.0)
        else:
            step(scheduler)
    check_idle(scheduler)


def test_a_request_is_given_up_when_its_time_is_over_or_it_waited_too_long() -> None:
    scheduler = make_scheduler(max_running=1, num_blocks=30, max_wait_s=5.0)
    running = start(scheduler, "r", most=30)
    step(scheduler, now=0.0)
    hurried, patient = start(scheduler, "h", now=1.0, timeout_s=2.0), start(scheduler, "p", now=1.0)
    assert step(scheduler, now=2.9)[0].ended == []
    assert step(scheduler, now=3.0)[0].ended == [hurried]
    assert step(scheduler, now=6.0)[0].ended == [patient]
    assert running.finish is None and hurried.finish == patient.finish == "deadline"
    limited = start(scheduler, "l", now=7.0, most=30, timeout_s=4.0)
    scheduler.abort("r", 7.0)
    step(scheduler, now=7.0)
    assert limited.state is State.RUNNING
    assert step(scheduler, now=11.0)[0].ended == [limited]
    check_idle(scheduler)


# --- batching modes


def counts(batching: str, **more: object) -> list[int]:
    """How many ran in each step, of seven requests of 2, 3, … tokens that come one a step."""
    scheduler = make_scheduler(num_blocks=60, batching=batching, max_running=4, **more)
    found = []
    for now in range(100):
        if now < 7:
            start(scheduler, chr(97 + now), most=2 + now, now=float(now))
        decision, _ = step(scheduler, now=float(now))
        found.append(len(decision.sampling))
        if now > 7 and not scheduler.has_work:
            return found
    raise AssertionError("not done")


def test_none_runs_one_at_a_time() -> None:
    assert max(counts("none")) == 1 and sum(counts("none")) == sum(range(2, 9))


def test_static_batches_start_when_the_one_before_is_over() -> None:
    # a alone; then b, c; then what came while they ran
    assert counts("static") == [1, 1, 2, 2, 2, 1, 4, 4, 4, 4, 4, 3, 2, 1]


def test_dynamic_batches_wait_until_they_are_full_or_the_window_is_over() -> None:
    assert counts("dynamic", batch_window_s=10.0)[:4] == [0, 0, 0, 4]
    assert counts("dynamic", batch_window_s=2.0)[:3] == [0, 0, 3]
    scheduler = make_scheduler(batching="dynamic", batch_window_s=2.0)
    assert scheduler.request_table.wake_at(0.0) is None
    start(scheduler, "a", now=1.0)
    assert scheduler.request_table.wake_at(1.5) == 3.0
    step(scheduler, now=3.0)
    assert scheduler.request_table.wake_at(3.1) == 3.1


def test_continuous_batches_take_new_ones_at_once() -> None:
    assert counts("continuous")[:4] == [1, 2, 2, 3]


# --- what can go wrong


BAD = {
    "empty": ({"prompt": []}, "the prompt is empty; give at least one token"),
    "too long": ({"prompt": [2] * 64}, "shorten it to 63"),
    "with its answer": ({"prompt": [2] * 60, "max_tokens": 8}, "ask for at most 4"),
    "negative id": ({"prompt": [2, -1]}, "token -1 outside the vocabulary of 50"),
    "large id": ({"prompt": [2, 50]}, "token 50 outside the vocabulary of 50"),
    "no id": ({"prompt": [2, 3.5]}, "has 3.5 among its token ids"),
    "cache": ({"prompt": [2] * 40, "max_tokens": 9}, "need 13 KV blocks and the cache has 12; ask for at most 48"),
    "stop id": ({"prompt": [2], "stop_ids": (77,)}, "stop_ids has token 77 outside the vocabulary of 50"),
    "bias": ({"prompt": [2], "logit_bias": {99: 1.0}}, "logit_bias has token 99"),
    "timeout": ({"prompt": [2], "timeout_s": 0.0}, "give a time above 0"),
    "structure": ({"prompt": [2], "structure": Structure(kind="json")}, "cannot constrain the output to a json"),
    "same id": ({"prompt": [2], "name": "good"}, "request 'good' is here already"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_told_and_the_others_go_on(case: str) -> None:
    scheduler = make_scheduler(num_blocks=12)
    good = ask("good", [2, 3, 4], 4)
    (seq,) = scheduler.submit(good, 0.0)
    step(scheduler)
    more, words = dict(BAD[case][0]), BAD[case][1]
    with pytest.raises(BadInput, match=words):
        scheduler.submit(ask(more.pop("name", "bad"), more.pop("prompt"), more.pop("max_tokens", 4), **more), 0.0)
    while scheduler.has_work:
        step(scheduler)
    assert seq.num_output == 4
    check_idle(scheduler)


def test_useless_numbers_end_one_request_and_its_blocks_are_not_trusted() -> None:
    scheduler = make_scheduler(num_blocks=30)
    bad, good = start(scheduler, "a", 9), start(scheduler, "b", 9)
    step(scheduler)
    decision = scheduler.schedule(0.0)
    outcome = scheduler.update(decision, [-1, 5], 0.0)
    assert outcome.finished == [bad] and outcome.sequences == [good] and outcome.tokens == [5]
    assert bad.finish == "error" and "check its weights" in bad.error and bad.output == [9]
    again = scheduler.submit(ask("once more", list(bad.request.prompt)), 0.0)[0]
    step(scheduler)
    assert again.cached_tokens == 0 and good.finish is None


def test_a_step_that_fails_ends_what_was_in_it_and_nothing_else() -> None:
    scheduler = make_scheduler(num_blocks=30, max_running=2)
    a, b, c = (start(scheduler, name) for name in "abc")
    step(scheduler)
    scheduler.schedule(0.0)
    assert scheduler.fail(1.0, "out of memory; lower serve.kv_bytes") == [a, b]
    assert len(scheduler.cache.prefix_cache) == 0 and a.error.startswith("out of memory")
    while scheduler.has_work:
        step(scheduler)
    assert c.finish == "length"
    check_idle(scheduler)


def test_a_step_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(BadInput, match=r"set serve\.max_running=8 or less"):
        make_scheduler(max_tokens_per_step=8, max_running=9)


class CountsDown:
    """A structure of so many even tokens."""

    def __init__(self, left: int) -> None:
        self.left = left

    def allowed(self) -> bytes:
        return b"\x55" * 7

    def advance(self, token: int) -> bool:
        self.left -= 1
        return token % 2 == 0

    def finished(self) -> bool:
        return not self.left


def test_a_structured_answer_waits_for_each_token_and_ends_when_complete() -> None:
    scheduler = make_scheduler(num_blocks=30)
    request = ask("a", [2, 3, 4], 20)
    (seq,) = scheduler.submit(request, 0.0, lambda: CountsDown(3))
    free = start(scheduler, "b", 3, 20)
    ran = []
    while seq.finish is None:
        decision = scheduler.schedule(0.0)
        ran.append(seq in decision.sampling)
        if len(scheduler.under_way) > 1:
            first = scheduler.under_way[0]
            scheduler.update(first, [4] * len(first.sampling), 0.0)
    assert ran == [True, False, True, False, True, False] and seq.finish == "stop" and seq.output == [4, 4, 4]
    assert free.num_output == 5


def test_long_forks_start_one_a_step() -> None:
    scheduler = make_scheduler(num_blocks=60, max_tokens_per_step=60, lookups=8)
    made = scheduler.submit(ask("a", [2 + i % 40 for i in range(50)], 8, n=4), 0.0)
    running = []
    for _ in range(4):
        step(scheduler)
        running.append(sum(seq.state is State.RUNNING for seq in made))
    assert running == [1, 2, 3, 4] and made[3].tables[0][:12] == made[0].tables[0][:12]


def test_what_is_over_is_not_kept_until_its_deadline() -> None:
    scheduler = make_scheduler(num_blocks=30)
    start(scheduler, "a", most=1, timeout_s=1e6)
    step(scheduler)
    assert not scheduler.request_table.deadlines._alive and scheduler.schedule(1.0).ended == []


def test_an_idle_engine_is_not_woken_by_deadlines_of_what_is_over() -> None:
    scheduler = make_scheduler(num_blocks=30, max_wait_s=600.0)
    start(scheduler, "a", most=1, timeout_s=900.0)
    step(scheduler)
    assert not scheduler.has_work
    assert scheduler.request_table.wake_at(1.0) is None and scheduler.request_table.wake_at(1000.0) is None


def test_a_token_that_breaks_the_structure_is_an_error() -> None:
    scheduler = make_scheduler(num_blocks=30)
    (seq,) = scheduler.submit(ask("a", [2, 3, 4], 20), 0.0, lambda: CountsDown(3))
    step(scheduler, token=5)
    assert seq.finish == "error" and "breaks the asked-for structure" in seq.error
