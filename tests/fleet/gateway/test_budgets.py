"""Budgets in tokens and dollars: never exceeded, known again after a restart, and new with each day or month."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput
from armillary.fleet.gateway.budgets import period_of, spent_before
from armillary.fleet.gateway.keys import Budget, KeyFile
from armillary.fleet.gateway.limits import LocalLimiter
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario

ASK: dict[str, Any] = {"model": "bot", "prompt": "hi", "max_tokens": 34}  # 100 tokens at most: 2, 64 and 34
PRICES = {"input_usd_per_million": 1e6, "output_usd_per_million": 1e6}  # a dollar per token


def key_with(folder: Path, **budget: Any) -> dict[str, str]:
    _, secret = KeyFile(folder / "keys.json").add("client", budget=budget)
    return {"authorization": f"Bearer {secret}"}


def test_days_and_months() -> None:
    now = datetime(2026, 12, 31, 23, 30, tzinfo=UTC).timestamp()
    end = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert period_of(Budget(period="day"), now) == ("2026-12-31", end)
    assert period_of(Budget(period="month"), now) == ("2026-12", end)
    assert period_of(Budget(period="month"), end)[0] == "2027-01"
    with pytest.raises(BadInput):
        Budget(usd=0)


@scenario
async def test_a_budget_of_tokens_is_never_exceeded(tmp_path: Path) -> None:
    key = key_with(tmp_path, tokens=120)
    async with gateway_of(tmp_path, FakeReplica(tokens=3)) as client:  # 8 tokens each, by the replica's count
        answers = [await client.post(ASK, **key) for _ in range(5)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[3].json["error"]["code"] == "insufficient_quota" and "120 tokens" in answers[3].message
        assert (await client.post(ASK | {"max_tokens": 20}, **key)).status == 200, "a smaller request fits"


@scenario
async def test_a_budget_of_dollars_counts_the_dearest_fallback(tmp_path: Path) -> None:
    key, dear = key_with(tmp_path, usd=150.0), FakeReplica(tokens=3)
    await dear.start()
    more = [{"name": "dear", "replicas": [{"url": dear.url}], "output_usd_per_million": 10e6}]
    async with gateway_of(tmp_path, FakeReplica(), more_models=more, **PRICES) as client:
        assert [(await client.post(ASK, **key)).status for _ in range(9)] == [200] * 7 + [429] * 2, "8 dollars each"
    async with gateway_of(tmp_path, FakeReplica(), more_models=more, fallback="dear", **PRICES) as client:
        refused = await client.post(ASK, **key)
        assert refused.status == 429 and "$340.00" in refused.message
    await dear.stop()


@scenario
async def test_spending_is_known_again_after_a_restart(tmp_path: Path) -> None:
    key = key_with(tmp_path, usd=1000.0)
    replica = FakeReplica(tokens=3, hangs_after=1)
    async with gateway_of(tmp_path, replica, **PRICES) as client:
        await client.post(ASK | {"stream": True}, leaves_after=1, **key)  # no counts: what was reserved is charged
        replica.hangs_after = None
        await client.post(ASK, **key)
        assert [line["usd"] for line in client.lines()] == [100.0, 8.0]
    keys = KeyFile(tmp_path / "keys.json").read()
    (bucket, spent) = next(item for item in spent_before(tmp_path / "audit.jsonl", keys, time.time()).items())
    totals = spent_before(tmp_path / "audit.jsonl", keys, time.time())
    assert totals[bucket.rpartition(":")[0] + ":usd"] == 108 * 10**9
    assert totals[bucket.rpartition(":")[0] + ":tokens"] == 108 and spent
    limiter = LocalLimiter(totals={name: total + 850 * 10**9 for name, total in totals.items()})
    async with gateway_of(tmp_path, FakeReplica(), limiter=limiter, **PRICES) as client:
        assert (await client.post(ASK, **key)).status == 429
    old = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[0]) | {"time": 0.0}
    (tmp_path / "audit.jsonl").write_text(json.dumps(old) + "\n")
    assert spent_before(tmp_path / "audit.jsonl", keys, time.time()) == {}
