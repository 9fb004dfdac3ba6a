"""Copies of requests for shadows: bounded, unseen by clients, and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.fleet.gateway.replicas import Client, FakeReplica, gateway_of, scenario, until

BODY = {"model": "bot", "prompt": "x", "max_tokens": 3, "stream": True}


def with_shadow(replica: FakeReplica, shadow: FakeReplica, fraction: float) -> dict[str, Any]:
    return {
        "replicas": [{"url": replica.url}, {"url": shadow.url, "shadow": True}],
        "shadow_fraction": fraction,
        "policy": "round-robin",
        "probe": "none",
    }


def shadow_of(client: Client) -> Any:
    return next(replica for _, replica in client.models.replicas() if replica.shadow)


@scenario
async def test_a_share_is_copied(folder: Path) -> None:
    replica, shadow = FakeReplica(), FakeReplica()
    await replica.start()
    await shadow.start()
    async with gateway_of(folder, **with_shadow(replica, shadow, 0.5)) as client:
        for _ in range(10):
            assert (await client.post(BODY)).status == 200
        await until(lambda: len(shadow.bodies) == 5)
        assert len(replica.bodies) == 10 and shadow.bodies[0] == replica.bodies[0]
        await until(lambda: shadow_of(client).ttft.count == 5)
        assert shadow_of(client).tpot.count == 5 and shadow_of(client).failures == 0
    await replica.stop()
    await shadow.stop()


@scenario
async def test_a_shadow_that_fails_or_hangs_is_not_noticed(folder: Path) -> None:
    for kind in ({"status": 500}, {"hangs": True}, {"dies_after": 1}):
        replica, shadow = FakeReplica(), FakeReplica(**kind)  # type: ignore[arg-type]
        await replica.start()
        await shadow.start()
        async with gateway_of(folder / str(kind)[2:8], **with_shadow(replica, shadow, 0.9)) as client:
            async with asyncio.timeout(5):
                answers = [await client.post(BODY) for _ in range(5)]
            assert {answer.status for answer in answers} == {200}
            assert all("[DONE]" in answer.text for answer in answers)
            assert {line["attempts"] for line in client.lines()} == {1}
            if "hangs" not in kind:
                await until(lambda: shadow_of(client).failures >= 1)
            assert (await client.get("/ready")).json["replicas_up"] == {"bot": 1}
            await client.gateway.close()  # ends the copies that hang
        await replica.stop()
        await shadow.stop()
