"""Keys, budgets, kept responses and nonces in a real Redis, as several gateways share them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError
from armillary.fleet.gateway.admin_signature import RedisNonces
from armillary.fleet.gateway.keys import KeyRing
from armillary.fleet.gateway.limits import Charge
from armillary.fleet.gateway.redis.cache import RedisCache
from armillary.fleet.gateway.redis.keys import RedisKeys
from armillary.fleet.gateway.redis.limits import RedisLimiter
from armillary.fleet.gateway.response_cache import CachedResponse
from tests.services.test_redis_limits import redis_server

pytestmark = pytest.mark.services


def test_keys(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        said = list[str]()
        keys = RedisKeys(server.url)
        ring = KeyRing(keys, said.append)
        assert ring.required, "a Redis that has lost its keys admits nobody"
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda i: keys.add(f"client-{i}"), range(16)))
        ring._reload()
        assert all(ring.find(secret.encode()) is not None for _, secret in made), "no writer's key is lost"
        rotated = keys.rotate("client-3", 0.0)[1]
        keys.revoke(made[4][0].id)
        ring._reload()
        assert ring.find(rotated.encode()) is not None
        assert ring.find(made[3][1].encode()) is None and ring.find(made[4][1].encode()) is None
        server.kill()
        for _ in range(2):
            ring._reload_or_say()
        assert ring.find(made[0][1].encode()) is not None and len(said) == 1, "keys stay while Redis is away"
        with pytest.raises(ArmillaryError, match="does not answer"):
            keys.read()
        keys.close()
        server.start()


def test_budgets_of_two_gateways(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        one, two = RedisLimiter(url, print), RedisLimiter(url, print)
        charge = Charge("k:2026-11:usd", 60, 100, 0.0, time.time() + 3600)
        assert await one.reserve("1", [charge]) is None
        refusal = await two.reserve("2", [charge])
        assert refusal is not None and 3500 < refusal.retry_after_s <= 3600
        for _ in range(2):
            await one.correct("1", [charge], [10])  # sent twice, counted once
        assert await two.reserve("2", [charge]) is None
        assert await one.reserve("3", [charge]) is not None
        await one.close()
        await two.close()

    with redis_server(tmp_path) as server:
        asyncio.run(run(server.url))


def test_responses_and_nonces(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        kept = CachedResponse(b"text/event-stream", (b"data: a\n\n", b"data: [DONE]\n\n"), True)
        one, two = RedisCache(url), RedisCache(url)
        await one.put(b"key", kept, 0.2)
        assert await two.get(b"key") == kept and await two.get(b"other") is None
        await asyncio.sleep(0.25)
        assert await two.get(b"key") is None
        nonces = RedisNonces(url), RedisNonces(url)
        assert await nonces[0].is_new("n") and not await nonces[1].is_new("n")
        for each in nonces:
            await each.close()
        server.kill()
        await one.put(b"key", kept, 60.0)
        assert await one.get(b"key") is None, "no failure where Redis is away"
        server.start()
        for cache in (one, two):
            await cache.close()

    with redis_server(tmp_path) as server:
        asyncio.run(run(server.url))
