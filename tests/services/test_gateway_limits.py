"""Limits over HTTP: 50 clients of three gateway processes on one Redis, which is killed and restarted meanwhile."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.keys import KeyFile
from tests.services.test_gateway_processes import Running, gateway, replica
from tests.services.test_redis_limits import Redis, redis_server

pytestmark = pytest.mark.services
CLIENTS, PROCESSES = 50, 3
Ask = Callable[[Running, int], tuple[int, Any]]
"""one request of a client to a gateway"""


def hammered(redis: Redis, fronts: list[Running], seconds: float, ask: Ask) -> list[tuple[int, Any]]:
    """(status, answer) of all requests; Redis is killed for half a second in the middle."""
    begin, answers = time.time(), list[tuple[int, Any]]()

    def client(number: int) -> None:
        while time.time() < begin + seconds:
            answers.append(ask(fronts[number % len(fronts)], number))
            time.sleep(0.02)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        time.sleep(seconds / 2)
        redis.kill()
        time.sleep(0.5)
        redis.start()
        for each in clients:
            each.result()
    return answers


def run(folder: Path, limits: dict[str, float], ask: Callable[[str], Ask]) -> tuple[list[Any], int]:
    """All answers, and the tokens that Redis has counted in the end."""
    record, key = KeyFile(folder / "gateway" / "keys.json").add("alice", limits=limits)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        behind = stack.enter_context(replica())
        fronts = [stack.enter_context(gateway(folder, behind.url, redis=redis.url)) for _ in range(PROCESSES)]
        answers = hammered(redis, fronts, 8.0, ask(key))
        costs = f"armillary:limit:{{{record.id}:bot:tokens}}:costs"
        line = ["redis-cli", "-p", str(redis.port), "HGET", costs, ""]
        return answers, int(subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip() or 0)


def test_exactly_the_limit_of_requests_is_served(tmp_path: Path) -> None:
    """In a window that is longer than the test: all together get as many as the limit, not one more or less."""

    def ask(key: str) -> Ask:
        return lambda front, number: front.post(key)

    answers, _ = run(tmp_path, {"requests": 137, "window_s": 600.0}, ask)
    statuses = [status for status, _ in answers]
    assert statuses.count(200) == 137 and 429 in statuses and set(statuses) <= {200, 429, 503}


def test_tokens_that_were_used_never_exceed_the_limit(tmp_path: Path) -> None:
    """Requests ask for random amounts; what Redis has counted in the end is what the replica says it used."""
    limit, rng = 1500, random.Random(4)

    def ask(key: str) -> Ask:
        return lambda front, number: front.post(key, max_tokens=rng.randint(3, 400), n=rng.randint(1, 2))

    answers, counted = run(tmp_path, {"tokens": limit, "window_s": 600.0}, ask)
    used = sum(sum(answer["usage"].values()) for status, answer in answers if status == 200)
    assert 0 < used <= counted <= limit
    if all(status != 503 for status, _ in answers):  # else a request may have been counted, and not told so in time
        assert used == counted, "settled to the token"
    refused = [answer["error"]["message"] for status, answer in answers if status == 429]
    assert refused and "1,500 tokens per 600 s" in refused[-1]
