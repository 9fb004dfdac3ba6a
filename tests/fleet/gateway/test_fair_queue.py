"""Slots are shared fairly between clients, by weight and priority, and a full queue pushes back on the busiest."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from armillary.fleet.gateway.fair_queue import FairQueue, Share
from armillary.fleet.gateway.keys import KeyFile
from armillary.serving.http.problem import Problem
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario, until

ASK = {"model": "bot", "prompt": "hello", "stream": True}


def order(queue: FairQueue, shares: list[Share]) -> list[str]:
    """Clients in the order in which they get the one slot; each keeps it until the next is served."""

    async def run() -> list[str]:
        served, busy = list[str](), Share(client="busy")
        assert queue.take(busy)

        async def one(share: Share) -> None:
            await queue.wait(share)
            served.append(share.client)

        tasks = [asyncio.create_task(one(share)) for share in shares]
        await asyncio.sleep(0)
        held = [busy]
        while len(served) < len(shares):
            queue.release(held.pop(0))
            await asyncio.sleep(0)
            held.append(next(share for share in shares if share.client == served[-1]))
        await asyncio.gather(*tasks)
        return served

    return asyncio.run(run())


def queue_of(slots: int = 1, *, max_waiting: int = 100, now: list[float] | None = None) -> FairQueue:
    ticks = itertools.count()
    clock = (lambda: now[0]) if now is not None else (lambda: next(ticks) * 1e-3)
    return FairQueue(slots, max_waiting=max_waiting, max_wait_s=5.0, clock=clock)


def test_a_client_that_sends_much_does_not_hold_up_another() -> None:
    many, few = Share(client="many"), Share(client="few")

    async def run() -> None:
        queue, served = queue_of(4), list[str]()
        assert all(queue.take(many) for _ in range(4)) and not queue.take(many)

        async def one(share: Share) -> None:
            await queue.wait(share)
            served.append(share.client)

        tasks = [asyncio.create_task(one(many)) for _ in range(10)] + [asyncio.create_task(one(few)) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(3):
            queue.release(many)
            await asyncio.sleep(0)
        assert served == ["few", "few", "many"], "two slots each"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.num_waiting == 0

    asyncio.run(run())


def test_priorities_go_first_and_waiting_outweighs_them() -> None:
    urgent, plain = Share(client="urgent", priority=-1), Share(client="plain")
    assert order(queue_of(), [plain, urgent]) == ["urgent", "plain"]
    now = [0.0]
    queue = queue_of(now=now)

    async def run() -> list[str]:
        served = list[str]()
        queue.take(Share(client="busy"))

        async def one(share: Share) -> None:
            await queue.wait(share)
            served.append(share.client)

        tasks = [asyncio.create_task(one(plain))]
        await asyncio.sleep(0)
        now[0] = 121.0  # two levels
        tasks.append(asyncio.create_task(one(urgent)))
        await asyncio.sleep(0)
        for client in ("busy", "plain"):
            queue.release(Share(client=client))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return served

    assert asyncio.run(run()) == ["plain", "urgent"]


def test_a_full_queue_refuses_the_busiest_client() -> None:
    many, few = Share(client="many"), Share(client="few")

    async def run() -> None:
        queue = queue_of(max_waiting=3)
        assert queue.take(many)
        tasks = [asyncio.create_task(queue.wait(many)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="3 requests wait"):
            await queue.wait(many)
        late = asyncio.create_task(queue.wait(few))
        await asyncio.sleep(0)
        with pytest.raises(Problem):
            await tasks[-1]
        assert queue.num_waiting == 3 and queue.refused == 2
        queue.release(many)
        await late
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


@scenario
async def test_waiting_over_http(tmp_path: Path) -> None:
    """One slot: everybody is served in turn, a client that leaves makes space, and nobody waits for ever."""
    _, secret = KeyFile(tmp_path / "keys.json").add("alice")
    key, replica = {"authorization": f"Bearer {secret}"}, FakeReplica(tokens=2, gap_s=0.02)
    async with gateway_of(tmp_path, replica, max_in_flight=1) as client:
        answers = await asyncio.gather(*(client.post(ASK, **key) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        page = (await client.get("/metrics", **key)).status
        assert page == 403, "this key lacks the scope"
    replica = FakeReplica(hangs_after=1)
    async with gateway_of(tmp_path, replica, max_in_flight=1, gateway={"max_wait_s": 0.2}) as client:
        first = asyncio.create_task(client.post(ASK, leaves_after=1, **key))
        queue = client.models.queue("bot")
        assert queue is not None
        await first
        replica.hangs_after = None
        assert (await client.post(ASK, **key)).status == 200, "the slot of a client that left is free"
        replica.hangs_after = 1
        stuck = asyncio.create_task(client.call("POST", "/v1/completions", b'{"model":"bot","stream":true}', **key))
        await until(lambda: len(replica.bodies) == 3)
        refused = await client.post(ASK, **key)
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        gone = await client.post(ASK, leaves_after=0, **key)
        assert gone.status == 0 and queue.num_waiting == 0
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
