"""Sliding windows are exact: against a slow twin that counts every window, with tokens reserved and corrected."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from armillary.fleet.gateway.admission import Admission
from armillary.fleet.gateway.body import decode, forwarded
from armillary.fleet.gateway.gateway_config import ModelSettings, ReplicaSettings
from armillary.fleet.gateway.keys import ApiKey, KeyFile, KeyRing, Limits
from armillary.fleet.gateway.limits import Charge, LocalLimiter
from armillary.fleet.gateway.redis.limits import LimiterUnavailable, RedisLimiter
from armillary.serving.http.problem import Problem
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario

ASK = {"model": "bot", "prompt": "hello", "max_tokens": 10}


def most_in_any_window(entries: list[tuple[float, int]], window_s: float) -> int:
    """The slow twin: the largest sum of any window (t, t + window_s]."""
    return max(sum(cost for at, cost in entries if end - window_s < at <= end) for end, _ in entries)


@pytest.mark.parametrize("seed", range(3))
def test_no_window_has_more_than_the_limit_and_none_is_refused_too_early(seed: int) -> None:
    rng, now, admitted = random.Random(seed), [0.0], list[tuple[float, int]]()
    limiter = LocalLimiter(clock=lambda: now[0])

    async def run() -> None:
        for number in range(600):
            now[0] += rng.expovariate(8.0)
            charge = Charge("k", rng.randint(1, 9), 20, 3.0)
            refusal = await limiter.reserve(str(number), [charge])
            inside = sum(cost for at, cost in admitted if now[0] - 3.0 < at)
            assert (refusal is None) == (inside + charge.cost <= 20)
            if refusal is None:
                admitted.append((now[0], charge.cost))
            else:
                later = now[0] + refusal.retry_after_s
                assert sum(cost for at, cost in admitted if later - 3.0 + 1e-9 < at) + charge.cost <= 20
                assert refusal.retry_after_s > 0

    asyncio.run(run())
    assert most_in_any_window(admitted, 3.0) <= 20


def test_all_limits_of_a_request_are_taken_or_none() -> None:
    async def run() -> None:
        limiter = LocalLimiter(clock=lambda: 0.0)
        requests, tokens = Charge("r", 1, 10, 60.0), Charge("t", 60, 100, 60.0)
        assert await limiter.reserve("1", [requests, tokens]) is None
        refusal = await limiter.reserve("2", [requests, tokens])
        assert refusal is not None and refusal.charge.bucket == "t"
        for number in range(9):
            assert await limiter.reserve(f"r{number}", [requests]) is None, "the refused request took nothing"
        await limiter.correct("1", [requests, tokens], [1, 20])
        assert await limiter.reserve("3", [Charge("t", 80, 100, 60.0)]) is None
        await limiter.correct("3", [Charge("t", 80, 100, 60.0)], [500])
        assert await limiter.reserve("4", [Charge("t", 1, 100, 60.0)]) is not None, "never more than was reserved"

    asyncio.run(run())


def key_with(folder: Path, **limits: int) -> dict[str, str]:
    _, secret = KeyFile(folder / "keys.json").add("client", limits=limits)
    return {"authorization": f"Bearer {secret}"}


@scenario
async def test_a_request_limit_over_http(tmp_path: Path) -> None:
    key = key_with(tmp_path, requests=3)
    async with gateway_of(tmp_path, FakeReplica()) as client:
        answers = [await client.post(ASK, **key) for _ in range(5)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[3].message.startswith("the limit of 3 requests per 60 s is reached; try again in ")
        assert 1 <= int(answers[3].headers["retry-after"]) <= 60
        assert answers[3].json["error"]["code"] == "rate_limit_exceeded"
        other = key_with(tmp_path, requests=3)
        client.gateway._admission._keys._checked_at = 0.0
        assert (await client.post(ASK, **other)).status == 200, "each key has its own"


@scenario
async def test_a_model_may_have_limits_of_its_own(tmp_path: Path) -> None:
    own = {"limits": {"requests": 2}, "model_limits": {"small": {"requests": 1}}}
    _, secret = KeyFile(tmp_path / "keys.json").add("client", **own)
    small = FakeReplica()
    await small.start()
    more = [{"name": "small", "replicas": [{"url": small.url}]}]
    async with gateway_of(tmp_path, FakeReplica(), more_models=more) as client:
        bearer = {"authorization": f"Bearer {secret}"}
        for model, statuses in (("bot", [200, 200, 429]), ("small", [200, 429])):
            assert [(await client.post(ASK | {"model": model}, **bearer)).status for _ in statuses] == statuses
    await small.stop()


@scenario
async def test_tokens_are_reserved_and_what_is_not_used_comes_back(tmp_path: Path) -> None:
    key = key_with(tmp_path, tokens=1000)
    replica = FakeReplica(tokens=2)  # 5 prompt tokens and 2 of completion, by its own count
    async with gateway_of(tmp_path, replica, default_max_tokens=50) as client:
        for _ in range(20):
            assert (await client.post(ASK | {"max_tokens": 700}, **key)).status == 200, "14 reserved would fill it"
        assert (await client.post(ASK | {"stream": True}, **key)).status == 200
        del replica.bodies[:]
        assert (await client.post({"model": "bot", "prompt": "x"}, **key)).status == 200
        assert replica.bodies[0]["max_tokens"] == 50, "what was reserved is what the replica may use"
        refused = await client.post(ASK | {"max_tokens": 2000}, **key)
        assert refused.status == 400 and "this key's limit is 1,000" in refused.message
        full = await client.post(ASK | {"max_tokens": 900}, **key)
        assert full.status == 429 and "1,000 tokens per 60 s" in full.message


@scenario
async def test_a_request_that_no_replica_answered_costs_nothing(tmp_path: Path) -> None:
    key, replica = key_with(tmp_path, requests=2), FakeReplica(status=429)
    async with gateway_of(tmp_path, replica) as client:
        for _ in range(4):
            assert (await client.post(ASK, **key)).status == 503
        replica.status = 200
        assert [(await client.post(ASK, **key)).status for _ in range(3)] == [200, 200, 429]


@scenario
async def test_without_redis_requests_with_limits_are_refused_or_served_as_set(tmp_path: Path) -> None:
    key, said = key_with(tmp_path, requests=2), list[str]()
    limiter = RedisLimiter("redis://127.0.0.1:1/0", said.append, retry_s=0.0)
    with pytest.raises(LimiterUnavailable):
        await limiter.reserve("1", [Charge("k", 1, 1, 1.0)])
    async with gateway_of(tmp_path, FakeReplica(), limiter=limiter) as client:
        refused = await client.post(ASK, **key)
        assert (refused.status, refused.json["error"]["code"]) == (503, "limiter_unavailable")
    async with gateway_of(tmp_path, FakeReplica(), limiter=limiter, gateway={"on_redis_failure": "allow"}) as client:
        assert [(await client.post(ASK, **key)).status for _ in range(4)] == [200] * 4
    assert len(said) == 1 and said[0].startswith("Redis does not answer"), "one line, not one per request"
    await limiter.close()


@scenario
async def test_a_connection_that_redis_has_just_closed_is_replaced(tmp_path: Path) -> None:
    """uvloop raises RuntimeError where such a connection is written to; that was status 500."""
    limiter, calls = RedisLimiter("redis://127.0.0.1:1/0", print), list[object]()

    async def script(**arguments: object) -> list[int]:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("unable to perform operation; the handler is closed")
        return [0, 0]

    limiter._reserve = script
    assert await limiter.reserve("1", [Charge("k", 1, 1, 1.0)]) is None and calls[0] == calls[1]
    await limiter.close()


def test_whatever_may_become_prompt_text_counts() -> None:
    call = {"function": {"name": "f", "arguments": "x" * 5000}}
    hidden = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    for more in (hidden, {"query": "x" * 5000}, {"response_format": {"schema": "x" * 5000}}):
        body = decode(json.dumps({"model": "m", **more}).encode(), "/v1/chat/completions")
        assert body.most_prompt_tokens(1.0, 64) > 5000


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/chat/completions", {"max_tokens": 3, "max_completion_tokens": 70}, 70),
        ("/v1/completions", {"max_tokens": 70, "max_completion_tokens": 3}, 70),
        ("/v1/completions", {"max_tokens": 7, "n": 5, "prompt": ["a", "b"]}, 70),
        ("/v1/completions", {"max_tokens": 7, "best_of": 2000, "prompt": [1, 2, 3]}, 14_000),
        ("/v1/completions", {"max_completion_tokens": 3, "prompt": [[1], [2]]}, 100),
        ("/v1/messages", {"max_tokens": 70, "max_output_tokens": 3}, 70),
        ("/v1/responses", {"max_output_tokens": 70, "max_tokens": 3}, 70),
        ("/v1/responses", {"max_tokens": 3}, 50),
        ("/v1/completions", {"max_tokens": 0, "echo": True}, 0),
        ("/tokenize", {"max_tokens": 9}, 0),
    ],
)
def test_no_field_makes_a_replica_generate_more_than_was_reserved(
    path: str, fields: dict[str, object], tokens: int
) -> None:
    """A bound counts only where the path has it, times choices and prompts, and is the only one that is forwarded."""
    key = ApiKey(id="k", name="k", secrets=(), created=0.0, limits=Limits(tokens=100_000))
    model = ModelSettings(name="m", replicas=(ReplicaSettings(url="http://x"),), default_max_tokens=50)
    body = decode(json.dumps({"model": "m"} | fields).encode(), path)
    admission = Admission(KeyRing(KeyFile(Path("/nowhere/keys.json"))), LocalLimiter())
    reserved = asyncio.run(admission.reserve(key, body, [model]))
    prompt = body.most_prompt_tokens(1.0, 64) if path != "/tokenize" else 0
    assert reserved.tokens == prompt + tokens
    sent = json.loads(forwarded(body, model="m", max_tokens=reserved.max_tokens, usage=False))
    bounds = [value for name, value in sent.items() if name.startswith("max_")]
    assert path == "/tokenize" or bounds == [reserved.max_tokens]


@pytest.mark.parametrize("value", ["70", 70.0, True, [70], 10**30])
@pytest.mark.parametrize("name", ["n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_bound_is_a_whole_number(name: str, value: object) -> None:
    """Servers that convert texts and fractions would otherwise read another one than the gateway."""
    with pytest.raises(Problem, match=f"{name} is no whole number"):
        decode(json.dumps({"model": "m", name: value}).encode(), "/v1/chat/completions")
