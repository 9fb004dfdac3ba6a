"""Routing on hand-made loads: shares, affinity, and the faults that users of other routers report."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest

from armillary.fleet.gateway.breaker import FAILURES, Breaker
from armillary.fleet.gateway.prefix_index import BLOCK, PrefixIndex
from armillary.fleet.gateway.routing import Replica, Router

POLICIES = ("round-robin", "least-load", "power-of-two", "prefix")


def router(count: int, policy: str, **more: float) -> Router:
    return Router([Replica(name=str(i)) for i in range(count)], policy, seed=1, **more)  # type: ignore[arg-type]


def send(made: Router, prompt: bytes = b"", now: float = 0.0) -> Replica:
    replica = made.pick(prompt, now)
    assert replica is not None
    return replica


@pytest.mark.parametrize("policy", POLICIES)
def test_no_bias_to_the_first_replica_at_low_concurrency(policy: str) -> None:
    """One request at a time: ties were always won by replica 0."""
    made = router(4, policy)
    counts = Counter(send(made, bytes([i % 256]) * 64).name for i in range(2000))
    assert min(counts.values()) > 380 and len(counts) == 4, counts


def test_round_robin_is_even_and_passes_over_replicas_that_are_out() -> None:
    made = router(3, "round-robin")
    assert Counter(send(made).name for _ in range(300)) == {"0": 100, "1": 100, "2": 100}
    made.replicas[1].breaker.retry_at = 1e9
    assert Counter(send(made).name for _ in range(100)) == {"0": 50, "2": 50}


def test_least_load_and_power_of_two_prefer_the_idle() -> None:
    for policy in ("least-load", "power-of-two"):
        made = router(2, policy)
        made.replicas[0].in_flight = 3
        assert {send(made).name for _ in range(20)} == {"1"}


def test_a_miss_goes_to_the_least_loaded_replica() -> None:
    """The replica with the fewest cached prefixes was chosen, however busy it was: a hot spot that feeds itself."""
    made = router(3, "prefix")
    for number in range(30):
        made.index.add(b"%03d" % number * BLOCK, "0")
        made.index.add(b"x%03d" % number * BLOCK, "1")
    made.replicas[2].in_flight = 8  # empty cache, and busy
    chosen = Counter(send(made, random.Random(i).randbytes(4 * BLOCK)).name for i in range(50))
    assert chosen["2"] == 0


def test_a_shared_prefix_returns_to_its_replica() -> None:
    made = router(4, "prefix")
    prompts = {name: name.encode() * BLOCK * 4 for name in "abcdefgh"}
    first = {name: send(made, prompt + b"1").name for name, prompt in prompts.items()}
    again_at = {name: send(made, prompt + b"2" * BLOCK).name for name, prompt in prompts.items()}
    assert first == again_at


def test_imbalance_does_not_drop_all_affinity() -> None:
    """When one replica is far ahead of the others, the longest prefix among the others still decides."""
    made = router(4, "prefix")
    prompt = b"p" * BLOCK * 8
    for name, blocks in (("0", 8), ("1", 6), ("2", 1)):
        made.index.add(prompt[: blocks * BLOCK], name)
    made.replicas[0].in_flight = 50
    assert {send(made, prompt).name for _ in range(3)} == {"1"}


def test_a_dead_replica_is_not_kept_for_its_prefix() -> None:
    made = router(3, "prefix")
    prompt = b"p" * BLOCK * 4
    owner = send(made, prompt)
    for _ in range(FAILURES):
        owner.breaker.failed(now=0.0)
    assert all(send(made, prompt, now=0.1).name != owner.name for _ in range(10))
    assert made.pick(prompt, 0.1, exclude=[each for each in made.replicas if each is not owner]) is None


def simulate(policy: str, seed: int = 0) -> tuple[float, float]:
    """(hit rate of KV blocks, busiest replica's share over the mean) of shared-prefix traffic over four replicas, each
    with a cache that holds a quarter of the prefixes; 16 requests in flight."""
    rng, made = random.Random(seed), router(4, policy)
    documents = [rng.randbytes(16 * BLOCK) for _ in range(40)]
    caches = {replica.name: OrderedDict[int, None]() for replica in made.replicas}
    flight: list[Replica] = []
    hits = total = 0
    counts: Counter[str] = Counter()
    for _ in range(3000):
        if len(flight) == 16:
            flight.pop(rng.randrange(16)).in_flight -= 1
        document = min(int(rng.expovariate(0.08)), 39)  # some are asked for far more often than others
        replica = send(made, documents[document] + rng.randbytes(BLOCK))
        replica.in_flight += 1
        flight.append(replica)
        counts[replica.name] += 1
        cache = caches[replica.name]
        hits, total = hits + (document in cache), total + 1
        cache[document] = None
        cache.move_to_end(document)
        while len(cache) > 10:
            cache.popitem(last=False)
    return hits / total, max(counts.values()) / (sum(counts.values()) / 4)


def test_prefix_routing_doubles_the_hits_of_round_robin_without_a_hot_spot() -> None:
    plain, _ = simulate("round-robin", seed=7)
    prefix, busiest = simulate("prefix", seed=7)
    assert prefix >= 2 * plain and busiest <= 1.5, (plain, prefix, busiest)


def test_one_hot_prefix_is_shared_out() -> None:
    made = router(4, "prefix")
    counts = Counter(send(made, b"h" * BLOCK * 8).name for _ in range(1000))
    assert max(counts.values()) <= 1.5 * 250, counts


@pytest.mark.parametrize("policy", POLICIES)
def test_canaries_get_exactly_their_share(policy: str) -> None:
    replicas = [Replica(name="a"), Replica(name="b"), Replica(name="canary", canary=True)]
    made = Router(replicas, policy, canary_fraction=0.05, seed=1)
    assert Counter(send(made).name for _ in range(1000))["canary"] == 50
    replicas[2].breaker.retry_at = 1e9
    assert "canary" not in {send(made).name for _ in range(100)}
    replicas[2].breaker.retry_at = None
    replicas[0].breaker.retry_at = replicas[1].breaker.retry_at = 1e9
    assert send(made).name == "canary", "better than nobody"


def test_the_prefix_index_is_bounded_and_forgets() -> None:
    index = PrefixIndex(capacity=10)
    for number in range(100):
        index.add(bytes([number]) * BLOCK * 2, "a")
    assert len(index) == 10
    prompt = bytes([99]) * BLOCK * 2
    assert index.match(prompt, ["a", "b"]) == {"a": 2} and index.match(prompt[: BLOCK - 1], ["a"]) == {}
    index.forget("a")
    assert index.match(prompt, ["a"]) == {}


def test_a_circuit_opens_after_failures_lets_one_trial_pass_and_closes() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.admits(0.0)
        breaker.failed(0.0)
    assert not breaker.admits(0.5) and breaker.admits(1.1)
    breaker.begin()
    assert not breaker.admits(1.1), "one trial at a time"
    breaker.failed(1.1)
    assert not breaker.admits(2.9) and breaker.admits(3.2), "twice as long"
    breaker.begin()
    breaker.trial_ended()
    assert breaker.admits(3.2), "a trial whose client left says nothing"
    breaker.begin()
    breaker.succeeded()
    assert breaker.admits(0.0) and breaker.opened == 0


def test_a_passing_probe_does_not_close_a_circuit_that_requests_opened() -> None:
    """As where /ready answers and completions fail: it would flap once per second."""
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    breaker.probe_passed(0.5)
    assert not breaker.admits(0.5)
    breaker.probe_passed(1.1)
    assert breaker.retry_at is None
    breaker.failed(1.2)
    assert not breaker.admits(3.1) and breaker.admits(3.3), "for longer than before"
    for _ in range(2):
        breaker.probe_failed(4.0)
    breaker.probe_passed(4.1)
    assert breaker.admits(4.1), "a dead server that is back"


def test_requests_in_flight_when_a_circuit_opens_do_not_prolong_its_pause() -> None:
    breaker = Breaker()
    for _ in range(40):
        breaker.failed(0.0)
    assert breaker.admits(1.1), "one failure of the replica, however many requests it had"
