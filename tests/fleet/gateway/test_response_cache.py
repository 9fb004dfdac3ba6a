"""Kept responses: exact, for a time, bounded, per client, and streams stay streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from armillary.fleet.gateway.body import decode
from armillary.fleet.gateway.keys import KeyFile
from armillary.fleet.gateway.response_cache import CachedResponse, ResponseCache
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario

ASK: dict[str, Any] = {"model": "bot", "prompt": "hello", "temperature": 0}


@scenario
async def test_equal_deterministic_requests_are_answered_once(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica, cache_s=60) as client:
        for body in (ASK, ASK | {"stream": True}):
            first, second = await client.post(body), await client.post(dict(reversed(body.items())))
            assert (second.text, second.status) == (first.text, 200), "whatever the order of its keys"
            assert "x-cache" not in first.headers and second.headers["x-cache"] == "hit"
            assert second.headers["content-type"] == first.headers["content-type"]
            assert second.headers["x-request-id"] != first.headers["x-request-id"]
        assert len(replica.bodies) == 2 and [line["cached"] for line in client.lines()] == [False, True] * 2
        assert client.lines()[1]["completion_tokens"] is None, "nothing was computed"
        for body in (ASK | {"temperature": 1}, ASK | {"n": 2}, {"model": "bot", "prompt": "x"}):
            for _ in range(2):
                assert "x-cache" not in (await client.post(body)).headers, "chance plays a part"
        assert "x-cache" not in (await client.post(ASK, cache_control="no-cache")).headers


@scenario
async def test_clients_never_share_an_entry(tmp_path: Path) -> None:
    secrets = [KeyFile(tmp_path / "keys.json").add(name)[1] for name in ("alice", "bob")]
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica, cache_s=60) as client:
        for secret in secrets:
            answer = await client.post(ASK, authorization=f"Bearer {secret}")
            assert answer.status == 200 and "x-cache" not in answer.headers
        assert len(replica.bodies) == 2


@scenario
async def test_failures_are_not_kept_and_requests_still_count(tmp_path: Path) -> None:
    _, secret = KeyFile(tmp_path / "keys.json").add("alice", limits={"requests": 3, "tokens": 100_000})
    key, replica = {"authorization": f"Bearer {secret}"}, FakeReplica(status=400)
    async with gateway_of(tmp_path, replica, cache_s=60) as client:
        assert (await client.post(ASK, **key)).status == 400
        replica.status = 200
        statuses = [(await client.post(ASK, **key)).status for _ in range(3)]
        assert statuses == [200, 200, 429] and len(replica.bodies) == 2


def test_entries_end_and_the_cache_is_bounded() -> None:
    now = [0.0]
    cache = ResponseCache(10_000, clock=lambda: now[0])
    keys = [
        cache.key("t", decode(b'{"model":"m","temperature":0,"seed":%d}' % i, "/v1/completions"), {}) for i in range(20)
    ]
    assert len(set(keys)) == 20 and None not in keys
    for key in keys:
        assert key is not None
        cache.put(key, CachedResponse(b"x", (b"y" * 1000,), False), ttl_s=5.0)
    assert cache.bytes <= 10_000
    assert keys[-1] is not None and keys[0] is not None
    assert cache.get(keys[-1]) is not None and cache.get(keys[0]) is None
    now[0] = 5.0
    assert cache.get(keys[-1]) is None


@scenario
async def test_a_stream_that_ends_with_an_error_is_not_kept(tmp_path: Path) -> None:
    replica = FakeReplica(error_after=1)
    async with gateway_of(tmp_path, replica, cache_s=60) as client:
        for _ in range(2):
            answer = await client.post(ASK | {"stream": True})
            assert '"error"' in answer.text and "x-cache" not in answer.headers
