"""The prefix cache finds what begins alike, nothing else, and says why it did not find more."""

from __future__ import annotations

import pytest

from armillary.engine.cache.block_hash import Chain, digest, root
from armillary.engine.cache.prefix_cache import MEANING
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.scheduler import Scheduler
from tests.engine.fake import ask, make_scheduler

TEXT = list(range(2, 20))  # four blocks of four and a half


def serve(scheduler: Scheduler, name: str, prompt: list[int], most: int = 1, **more: object) -> Sequence:
    """Serve one request to its end."""
    (seq,) = scheduler.submit(ask(name, prompt, most, **more), 0.0)
    while seq.finish is None:
        decision = scheduler.schedule(0.0)
        scheduler.update(decision, [9] * len(decision.sampling), 0.0)
    return seq


def test_a_chain_names_blocks_by_all_that_came_before() -> None:
    chain = Chain(root(), 4)
    chain.extend(TEXT, len(TEXT))
    again = Chain(root(), 4)
    for known in range(len(TEXT) + 1):  # a token at a time gives the same names
        again.extend(TEXT, known)
    assert len(chain) == 4 and chain.digests == again.digests and chain.chunks == again.chunks
    other = Chain(root(), 4)
    other.extend([99, *TEXT[1:]], len(TEXT))
    assert not set(chain.digests) & set(other.digests) and chain.chunks[1:] == other.chunks[1:]
    assert chain.digests[1] == digest(chain.digests[0], chain.chunks[1]) and chain.parent(0) == root()


def test_a_fork_s_chain_goes_its_own_way() -> None:
    chain = Chain(root(), 4)
    chain.extend(TEXT, 8)
    fork = chain.copy()
    fork.extend([*TEXT[:8], 1, 1, 1, 1], 12)
    chain.extend(TEXT, 12)
    assert fork.digests[:2] == chain.digests[:2] and fork.digests[2] != chain.digests[2]


def test_salts_and_adapters_cannot_be_confused() -> None:
    assert len({root(), root("a"), root("", "a"), root("a", "b"), root("b", "a"), root("a:b"), root("1:a")}) == 7


WHY = {
    "partial": (TEXT, {}, 16),
    "short": (TEXT[:4], {}, 0),
    "cold": ([40, *TEXT], {}, 0),
    "salt": (TEXT, {"salt": "mine"}, 0),
    "diverged": ([*TEXT[:8], 40, 41, 42, 43, 44], {}, 8),
    "extends": ([*TEXT, *TEXT], {}, 16),
    "off": (TEXT, {"prompt_logprobs": 1}, 0),
}


@pytest.mark.parametrize("why", WHY)
def test_a_miss_says_why(why: str) -> None:
    scheduler = make_scheduler(num_blocks=30)
    assert serve(scheduler, "a", TEXT).miss == "cold"
    prompt, more, cached = WHY[why]
    seq = serve(scheduler, "b", prompt, **more)
    assert (seq.miss, seq.cached_tokens) == (why, cached) and MEANING[why]  # type: ignore[index]


def test_an_adapter_has_blocks_of_its_own() -> None:
    scheduler = make_scheduler(num_blocks=30)
    scheduler.request_table.adapters |= {"one", "two"}
    serve(scheduler, "a", TEXT, adapter="one")
    assert serve(scheduler, "b", TEXT, adapter="two").miss == "salt"
    assert serve(scheduler, "c", TEXT, adapter="one").cached_tokens == 16


def test_without_the_cache_nothing_is_found() -> None:
    scheduler = make_scheduler(num_blocks=30, prefix=False)
    serve(scheduler, "a", TEXT)
    seq = serve(scheduler, "b", TEXT)
    assert (seq.miss, seq.cached_tokens, scheduler.totals.looked_up) == ("off", 0, 0)


def test_what_made_room_is_remembered_and_ends_are_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=6)
    serve(scheduler, "a", TEXT)
    serve(scheduler, "b", [40, 41, 42, 43, 44, 45, 46, 47, 48])
    seq = serve(scheduler, "c", TEXT)
    assert seq.miss == "evicted" and 0 < seq.cached_tokens < 16


def test_answers_are_found_too_when_a_conversation_goes_on() -> None:
    scheduler = make_scheduler(num_blocks=30)
    first = serve(scheduler, "a", TEXT, 8)
    assert first.output == [9] * 8
    assert serve(scheduler, "b", [*TEXT, *first.output, 40, 41]).cached_tokens == 24


def test_a_prompt_that_another_request_is_computing_is_shared_as_it_is_computed() -> None:
    scheduler = make_scheduler(num_blocks=40, max_tokens_per_step=8)
    a, b = (scheduler.submit(ask(name, list(range(2, 35)), 1), 0.0)[0] for name in "ab")
    computed = 0
    while scheduler.has_work:
        decision = scheduler.schedule(0.0)
        computed += decision.num_tokens
        scheduler.update(decision, [9] * len(decision.sampling), 0.0)
    assert a.cached_tokens == 0 and b.cached_tokens == 32 and computed == 33 + 1


def test_tokens_looked_up_and_found_are_counted() -> None:
    scheduler = make_scheduler(num_blocks=30)
    serve(scheduler, "a", TEXT)
    serve(scheduler, "b", TEXT)
    assert (scheduler.totals.looked_up, scheduler.totals.hits) == (36, 16)


def test_clearing_forgets_everything() -> None:
    scheduler = make_scheduler(num_blocks=30)
    serve(scheduler, "a", TEXT)
    scheduler.cache.prefix_cache.clear()
    assert serve(scheduler, "b", TEXT).miss == "cold"
