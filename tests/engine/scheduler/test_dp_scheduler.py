"""One queue and a KV cache per dp rank, with a stand-in for model and executor."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from typing import Any

import pytest

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.request.request import Request
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.dp_scheduler import DpDecision, DpScheduler, DpSpeculation
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.settings import Settings
from armillary.engine.scheduler.step_loop import Loop
from tests.engine.fake import EOS, VOCAB, FakeExecutor, ask, expected
from tests.engine.scheduler.test_prefill_pacing import Device
from tests.engine.speculative.test_speculation import with_oracle


def make_scheduler(num_ranks: int = 2, num_blocks: int = 12, *, prefix: bool = True, **settings: Any) -> DpScheduler:
    given = {
        "max_model_len": 64,
        "vocab": VOCAB,
        "eos_ids": frozenset({EOS}),
        "max_tokens_per_step": 16,
        "max_running": 4,
        "check_every": 1,
    } | settings
    caches = [KVCache(num_blocks + 1, 4, prefix=prefix, step_tokens=16) for _ in range(num_ranks)]
    return DpScheduler(Settings(**given), caches)


class Executors:
    """One per dp rank."""

    def __init__(self, scheduler: DpScheduler) -> None:
        self.ranks = [FakeExecutor(cache, scheduler.settings.max_running) for cache in scheduler.caches]

    def launch(self, decision: Decision) -> list[int]:
        assert isinstance(decision, DpDecision)
        return [
            token
            for rank, part in zip(self.ranks, decision.parts, strict=True)
            if not part.empty
            for token in rank.launch(part)
        ]

    def tokens(self, drawn: list[int]) -> list[int]:
        return drawn


def run(scheduler: DpScheduler, requests: Items[Request], *, overlap: bool = False, every: int = 0) -> dict[str, Any]:
    """Serve `requests`, a new one each `every` steps (0: all at once), until all are done; id -> sequence."""
    loop = Loop(scheduler, Executors(scheduler), overlap=overlap, clock=lambda: float(number))
    left, answers = list(requests), {}
    for number in range(5000):
        for request in left[: 1 if every else len(left)] if not every or not number % every else ():
            answers |= {seq.id: seq for seq in scheduler.submit(request, float(number))}
            left.remove(request)
        loop.step()
        if not left and not scheduler.has_work and not scheduler.under_way:
            break
    else:
        raise AssertionError("not done")
    for rank in scheduler.ranks:
        check_idle(rank)
    assert not scheduler.request_table.running and not scheduler.request_table.num_waiting
    return answers


def prompts(count: int, seed: int = 0, most: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    starts = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(4, 16))] for _ in range(3)]
    return [
        rng.choice(starts) + [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, most - 16))] for _ in range(count)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_ranks", "every"), [(2, 0), (3, 2), (4, 1)])
def test_every_answer_is_that_of_one_request_alone(num_ranks: int, every: int, overlap: bool) -> None:
    scheduler = make_scheduler(num_ranks, reserve=0.0)
    requests = [ask(f"r{i}", prompt, 14, n=1 + (i % 5 == 0)) for i, prompt in enumerate(prompts(24))]
    answers = run(scheduler, requests, overlap=overlap, every=every)
    assert len(answers) == 29 and scheduler.totals.hits > 0
    for seq in answers.values():
        assert seq.output == expected(seq.request, seq.index, max_model_len=64), seq.id
    assert {seq.dp_rank for seq in answers.values()} == set(range(num_ranks))


def test_preempted_requests_are_computed_again_on_their_rank() -> None:
    scheduler = make_scheduler(2, reserve=0.0, prefix=False)
    requests = [ask(f"r{i}", [2 + i] * 12, 24, ignore_eos=True) for i in range(8)]
    answers = run(scheduler, requests)
    assert scheduler.totals.preempted > 0
    assert all(seq.output == expected(seq.request, eos=None) for seq in answers.values())


def test_requests_go_to_the_rank_with_most_free_blocks() -> None:
    scheduler = make_scheduler(2)
    sizes = (20, 4, 4, 4)
    sequences = [scheduler.submit(ask(f"r{i}", [2 + i] * size), 0.0)[0] for i, size in enumerate(sizes)]
    scheduler.schedule(0.0)
    assert [seq.dp_rank for seq in sequences] == [0, 1, 1, 1]


def test_blocks_that_a_prompt_under_way_still_needs_are_not_free() -> None:
    scheduler = make_scheduler(2)
    long, short = (scheduler.submit(ask(name, [size] * size), 0.0)[0] for name, size in (("long", 40), ("short", 16)))
    scheduler.schedule(0.0)
    assert (long.dp_rank, short.dp_rank) == (0, 1) and long.num_blocks == short.num_blocks
    third = scheduler.submit(ask("third", [4] * 12), 1.0)[0]
    scheduler.schedule(1.0)
    assert third.dp_rank == 1


def test_blocks_that_a_waiting_request_needs_are_not_free() -> None:
    scheduler = make_scheduler(2, reserve=1.0, prefix=False)
    sizes = {"first": 8, "second": 8, "waits": 16}
    sequences = [scheduler.submit(ask(name, [3] * size, 30), 0.0)[0] for name, size in sizes.items()]
    scheduler.update(scheduler.schedule(0.0), [5, 5], 0.0)
    assert [seq.dp_rank for seq in sequences] == [0, 1, 0] and scheduler.request_table.num_waiting == 1
    fourth = scheduler.submit(ask("fourth", [4] * 4), 1.0)[0]
    scheduler.schedule(1.0)
    assert fourth.dp_rank == 1


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    scheduler, prompt = make_scheduler(2), list(range(2, 22))
    run(scheduler, [ask("first", prompt, 4)])
    filler = scheduler.submit(ask("filler", [40] * 4, 30), 0.0)[0]
    scheduler.schedule(0.0)
    assert filler.dp_rank == 0  # so the other has more free blocks
    same, other = (
        scheduler.submit(ask(name, text), 1.0)[0] for name, text in (("same", prompt), ("other", prompt[::-1]))
    )
    scheduler.schedule(1.0)
    assert same.dp_rank == 0 and same.cached_tokens == 16
    assert other.dp_rank == 1


def test_completions_of_a_request_share_a_rank() -> None:
    answers = run(make_scheduler(2), [ask("a", [3] * 9, n=3), ask("b", [4] * 9, n=3)])
    ranks = {name: {seq.dp_rank for seq in answers.values() if seq.request.id == name} for name in "ab"}
    assert ranks == {"a": {0}, "b": {1}}


def test_n_ranks_hold_n_times_as_many_tokens() -> None:
    most = []
    for num_ranks in (1, 2, 4):
        scheduler = make_scheduler(num_ranks, reserve=1.0, prefix=False)
        for i in range(20):
            scheduler.submit(ask(f"r{i}", [2 + i] * 15, 8, ignore_eos=True), 0.0)
        for step in range(4):
            decision = scheduler.schedule(float(step))
            scheduler.update(decision, [5] * len(decision.sampling), step + 0.5)
        most.append(len(scheduler.request_table.running))
    assert most == [2, 4, 8]


def test_a_request_waits_for_the_rank_that_is_free_first() -> None:
    scheduler = make_scheduler(2, max_running=1, max_tokens_per_step=64)
    short, long = (
        scheduler.submit(ask(name, [3] * 8, most, ignore_eos=True), 0.0)[0] for name, most in (("s", 2), ("l", 20))
    )
    third = scheduler.submit(ask("third", [4] * 8, 2), 0.0)[0]
    while third.dp_rank < 0:
        decision = scheduler.schedule(0.0)
        assert scheduler.request_table.num_waiting == (third.dp_rank < 0)
        scheduler.update(decision, [5] * len(decision.sampling), 0.0)
    assert third.dp_rank == short.dp_rank != long.dp_rank and short.finish == "length" and long.finish is None


def test_requests_end_wherever_they_are() -> None:
    scheduler = make_scheduler(2, max_running=1)
    runs, waits, expires = (
        scheduler.submit(ask(name, [3] * 8, 30, ignore_eos=True, timeout_s=time), 0.0)[0]
        for name, time in (("runs", None), ("waits", None), ("expires", 5.0))
    )
    late = scheduler.submit(ask("late", [3] * 8, timeout_s=5.0), 0.0)[0]
    scheduler.update(scheduler.schedule(0.0), [5, 5], 0.0)
    assert (runs.dp_rank, waits.dp_rank, expires.dp_rank) == (0, 1, -1)
    assert scheduler.abort("runs", 1.0) == [runs] and scheduler.abort("waits", 1.0) == [waits]
    scheduler.schedule(2.0)
    assert expires.dp_rank >= 0 and late.dp_rank >= 0
    assert set(scheduler.schedule(6.0).ended) == {expires, late} and not scheduler.has_work


def test_a_rank_without_rows_has_an_empty_part() -> None:
    scheduler = make_scheduler(2)
    scheduler.submit(ask("alone", [3] * 8), 0.0)
    decision = scheduler.schedule(0.0)
    assert [part.empty for part in decision.parts] == [False, True] and not decision.empty


def test_a_step_that_fails_ends_the_requests_in_it() -> None:
    scheduler = make_scheduler(2)
    in_step = [scheduler.submit(ask(f"r{i}", [3 + i] * 8), 0.0)[0] for i in range(2)]
    scheduler.schedule(0.0)
    assert scheduler.fail(1.0, "broken") == in_step and not scheduler.has_work and not scheduler.under_way


def test_requests_that_a_failed_step_spared_go_on_at_once() -> None:
    scheduler = make_scheduler(2, max_tokens_per_step=4, reserve=0.0)
    in_step, spared = (scheduler.submit(ask(name, [3] * 8, 4), 0.0)[0] for name in "ab")
    while not (spared.computed and in_step.computed):
        decision = scheduler.schedule(0.0)
        scheduler.update(decision, [5] * len(decision.sampling), 0.0)
    scheduler.schedule(1.0).parts[1].chunks.clear()
    assert scheduler.fail(1.0, "broken") == [in_step] and not scheduler.request_table.running
    assert scheduler.request_table.wake_at(1.0) == 1.0 and scheduler.request_table.num_waiting == 1


def test_parts_are_counted_as_one_step_and_every_rank_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr("armillary.engine.scheduler.invariants.check", checked.append)
    scheduler = make_scheduler(2, check_every=2)
    scheduler.submit(ask("a", [3] * 8, 20, ignore_eos=True), 0.0)
    for step in range(1, 4):
        decision = scheduler.schedule(0.0)
        assert decision.number == scheduler.totals.steps == step
        assert {part.number for part in decision.parts} == {step}
        scheduler.update(decision, [5], 0.0)
    assert set(map(id, checked)) == set(map(id, scheduler.ranks))


def test_prefill_is_limited_while_another_rank_decodes() -> None:
    scheduler = make_scheduler(2, prefill_tokens=4, num_blocks=30)
    scheduler.submit(ask("decodes", [3] * 8, 20, ignore_eos=True), 0.0)
    scheduler.update(scheduler.schedule(0.0), [5], 0.0)
    scheduler.submit(ask("prompt", [4] * 20), 1.0)
    decision = scheduler.schedule(1.0)
    assert [len(part.decodes) for part in decision.parts] == [1, 0] and decision.num_prefill_tokens == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_of_each_rank_change_no_answer(seed: int, overlap: bool) -> None:
    scheduler = make_scheduler(2, 16, max_running=8)
    oracles = [with_oracle(rank, seed + at) for at, rank in enumerate(scheduler.ranks)]
    scheduler.speculation = DpSpeculation(oracles)
    requests = [ask(f"r{i}", prompt, 14, ignore_eos=True) for i, prompt in enumerate(prompts(12, seed))]
    answers = run(scheduler, requests, overlap=overlap)
    assert all(seq.output == expected(seq.request, eos=None) for seq in answers.values())
    assert scheduler.totals.accepted > 0


@pytest.mark.parametrize("long_prompts", [1, 2])
def test_steps_of_all_ranks_keep_the_pace(long_prompts: int) -> None:
    """A stream on one rank, long prompts on one or both: the longest step over one without prompts."""
    free, streamed, chosen = (
        make_scheduler(2, 3000, max_model_len=6400, max_tokens_per_step=1024, check_every=50, **more)
        for more in ({}, {}, {"prefill_slowdown": 3.0})
    )
    streamed.stream()
    assert longest_step(free, long_prompts) > 4
    assert longest_step(streamed, long_prompts) < 2.4
    assert 2.6 < longest_step(chosen, long_prompts) < 3.4


def longest_step(scheduler: DpScheduler, long_prompts: int) -> float:
    device, now, longest, left = Device(5e-3, 2e-5, 2e-9), 0.0, 0.0, 6000 * long_prompts
    for i in range(4):
        scheduler.submit(ask(f"stream {i}", [2, 3, 4 + i], 900, ignore_eos=True), now)
    for turn in range(300):
        for i in range(long_prompts if turn == 12 else 0):
            scheduler.submit(ask(f"long {i}", [2 + (j + i) % 40 for j in range(6000)], 1), now)
        decision = scheduler.schedule(now)
        took = device.seconds(len(decision.decodes), [(chunk.start, chunk.size) for chunk in decision.chunks])
        now += took
        left -= decision.num_prefill_tokens * (turn >= 12)
        scheduler.update(decision, [3] * len(decision.sampling), now)
        longest = max(longest, took) if turn >= 12 else 0.0
    assert left <= 0, "the prompts are computed"
    return longest / device.seconds(4, [])


def test_the_default_limit_gives_way_where_more_wait_on_all_ranks_than_decode() -> None:
    for waiting, paced in ((3, True), (12, False)):
        scheduler = make_scheduler(2, 400, max_model_len=400, max_tokens_per_step=1024, max_running=16)
        scheduler.stream()
        for i in range(4):
            scheduler.submit(ask(f"stream {i}", [2, 3, 4 + i], 300, ignore_eos=True), 0.0)
        for turn in range(8):
            decision = scheduler.schedule(5e-3 * turn)
            scheduler.update(decision, [3] * len(decision.sampling), 5e-3 * (turn + 1))
        for i in range(waiting):
            scheduler.submit(ask(f"r{i}", [5 + i % 20] * 90, 4), 0.1)
        decision = scheduler.schedule(0.1)
        assert len(decision.decodes) == 4
        assert decision.num_prefill_tokens <= 64 if paced else decision.num_prefill_tokens > 500
