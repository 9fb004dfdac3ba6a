"""A server that things happen to: clients leave, queues fill, the engine freezes and dies, and the end comes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.http.connections import raise_file_limit
from tests.serving.streams import Streamed, request_bytes, stream
from tests.serving.tiny import Server, run_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the engine's process in /proc")

RUNNING, WAITING = 8, 56
LONG = {"prompt": "def main", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def fragile(folder: Path) -> Iterator[Server]:
    """One server for all of these; the last of them ends it."""
    flags = {"max_running": RUNNING, "max_waiting": WAITING, "frozen_s": 2, "drain_s": 60}
    words = [word for key, value in flags.items() for word in ("--set", f"serve.{key}={value}")]
    with run_server(folder, *words) as made:
        yield made


def all_idle(server: Server) -> bool:
    return server.metric("running") == server.metric("waiting") == server.metric("kv_used_fraction") == 0


def test_requests_of_clients_that_leave_are_given_up_and_their_blocks_are_free(fragile: Server) -> None:
    async def leave() -> list[Streamed]:
        return await asyncio.gather(*(stream(fragile, LONG, events=3) for _ in range(12)))

    names = (("requests_total", '{finish="abort"}'), ("aborted_total", ""))
    before = [fragile.metric(*name) for name in names]
    found = asyncio.run(leave())
    assert all(one.status == 200 and not one.done for one in found)
    fragile.until(lambda: all_idle(fragile) and fragile.metric("inflight") == 0)
    fragile.until(lambda: [fragile.metric(*name) for name in names] == [count + 12 for count in before])


def test_a_client_that_leaves_before_a_whole_answer_is_noticed_too(fragile: Server) -> None:
    before = fragile.metric("aborted_total")

    async def leave() -> None:
        _, writer = await asyncio.open_connection(*fragile.address)
        writer.write(request_bytes("/v1/completions", LONG | {"stream": False}))
        while fragile.metric("running") == 0:
            await asyncio.sleep(0.02)
        writer.transport.abort()

    asyncio.run(asyncio.wait_for(leave(), 30))
    fragile.until(lambda: all_idle(fragile) and fragile.metric("aborted_total") == before + 1)


def test_more_than_may_wait_are_refused_with_a_time_to_come_again(fragile: Server) -> None:
    rejected = fragile.metric("rejected_total")

    async def fill() -> Streamed:
        others = [asyncio.create_task(stream(fragile, LONG, timeout_s=200)) for _ in range(RUNNING + WAITING)]
        while fragile.metric("inflight") < RUNNING + WAITING:
            await asyncio.sleep(0.02)
        loop = asyncio.get_running_loop()
        status, text, headers = await loop.run_in_executor(
            None, lambda: fragile.call("POST", "/v1/completions", b'{"prompt": "def"}')
        )
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60 and "rate_limit_exceeded" in text
        assert fragile.metric("rejected_total") == rejected + 1
        fragile.until(fragile.is_ready)
        assert not any(task.done() for task in others), "whoever was let in is served"
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        fragile.until(lambda: fragile.metric("inflight") == 0)
        return await stream(fragile, LONG | {"max_tokens": 4})

    assert asyncio.run(fill()).done


def test_bodies_that_do_not_come_take_nobodys_place(fragile: Server) -> None:
    socks = [socket.create_connection(fragile.address, timeout=30) for _ in range(RUNNING + WAITING + 5)]
    try:
        for sock in socks:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        for _ in range(3):
            assert fragile.post("/v1/completions", {"prompt": "def", "max_tokens": 2})[0] == 200
    finally:
        for sock in socks:
            sock.close()


def test_a_request_has_its_time(fragile: Server) -> None:
    fragile.until(lambda: all_idle(fragile))
    before = fragile.metric("requests_total", '{finish="deadline"}')
    status, answer = fragile.post("/v1/completions", LONG | {"stream": False, "timeout_s": 0.2})
    assert status == 408 and answer["error"]["code"] == "timeout"
    assert fragile.metric("requests_total", '{finish="deadline"}') == before + 1


@pytest.mark.slow  # judges the clock: the first token comes before the time is over
def test_a_stream_has_its_time(fragile: Server) -> None:
    fragile.until(lambda: all_idle(fragile))
    before = fragile.metric("requests_total", '{finish="deadline"}')
    streamed = asyncio.run(stream(fragile, LONG | {"timeout_s": 0.3}))
    assert streamed.status == 200 and streamed.error["code"] == "timeout" and not streamed.done
    assert fragile.metric("requests_total", '{finish="deadline"}') == before + 1


def test_a_frozen_engine_is_not_ready_within_seconds_and_goes_on_when_it_thaws(fragile: Server) -> None:
    (engine,) = fragile.engine_pids()

    async def freeze() -> Streamed:
        begun = asyncio.Event()
        task = asyncio.create_task(stream(fragile, LONG | {"max_tokens": 300}, begun=begun))
        await begun.wait()
        os.kill(engine, signal.SIGSTOP)
        try:
            frozen_at = time.monotonic()
            while fragile.is_ready():
                assert time.monotonic() - frozen_at < 10
                await asyncio.sleep(0.05)
            assert "silent for" in fragile.get("/ready")[1] and fragile.get("/health")[0] == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        return await task

    assert asyncio.run(freeze()).done
    fragile.until(fragile.is_ready)


def kill_during(server: Server, streams: int) -> list[Streamed]:
    async def kill() -> list[Streamed]:
        events = [asyncio.Event() for _ in range(RUNNING)]
        tasks = [
            asyncio.create_task(stream(server, LONG, begun=events[i] if i < RUNNING else None)) for i in range(streams)
        ]
        await asyncio.wait({asyncio.create_task(event.wait()) for event in events}, return_when="FIRST_COMPLETED")
        while server.metric("inflight") < streams:
            await asyncio.sleep(0.02)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        return await asyncio.gather(*tasks)

    return asyncio.run(kill())


def check_killed(server: Server, found: list[Streamed], restarts: int) -> None:
    """All were told, with an error in the stream or as the answer; none hangs, and the server is back by itself."""
    assert {one.status for one in found} <= {200, 503}
    for one in found:
        assert one.done or one.error["code"] == "engine_failed", one
        assert one.done or "try again" in one.error["message"]
    assert any(not one.done for one in found) and server.get("/health")[0] == 200
    assert server.get("/ready")[0] in (200, 503)
    server.until(server.is_ready, 90)
    assert server.metric("restarts_total") == restarts and all_idle(server)
    status, answer = server.post("/v1/completions", {"prompt": "def", "max_tokens": 3, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


def test_killing_the_engine_during_many_streams_hangs_nobody_and_it_comes_back(fragile: Server) -> None:
    restarts = int(fragile.metric("restarts_total"))
    check_killed(fragile, kill_during(fragile, 50), restarts=restarts + 1)


def test_on_sigterm_what_is_under_way_is_finished_and_the_exit_code_is_0(fragile: Server) -> None:
    async def drain() -> list[Streamed]:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(stream(fragile, LONG | {"max_tokens": 200}, begun=begun)) for _ in range(6)]
        await begun.wait()
        while fragile.metric("inflight") < 6:
            await asyncio.sleep(0.02)
        fragile.process.send_signal(signal.SIGTERM)
        while True:
            try:
                _, writer = await asyncio.open_connection(*fragile.address)
                writer.close()
                await asyncio.sleep(0.02)
            except ConnectionError:
                break
        return await asyncio.gather(*tasks)

    engines = fragile.engine_pids()
    found = asyncio.run(drain())
    assert all(one.done and one.events[-1]["choices"][0]["finish_reason"] == "length" for one in found)
    assert fragile.process.wait(30) == 0, fragile.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)
    assert "Traceback" not in fragile.log.read_text() and "draining: 6 requests" in fragile.log.read_text()


@pytest.mark.slow
def test_a_thousand_streams_at_once_lose_and_double_no_token(folder: Path) -> None:
    raise_file_limit()
    wishes = [{"prompt": f"def main{i}", "max_tokens": 20, "ignore_eos": True, "temperature": 0} for i in range(25)]

    async def ask(server: Server) -> list[Streamed]:
        return await asyncio.gather(
            *(stream(server, wishes[i % 25] | {"stream": True}, timeout_s=300) for i in range(1000))
        )

    with run_server(folder) as server:
        alone = [server.post("/v1/completions", wish)[1]["choices"][0]["text"] for wish in wishes]
        found = asyncio.run(ask(server))
        assert all(one.done for one in found) and [one.text for one in found] == alone * 40
        server.until(lambda: all_idle(server) and server.metric("tokens_out_total") == 1025 * 20)
        assert server.metric("requests_total", '{finish="length"}') == 1025


@pytest.mark.slow
def test_killing_the_engine_during_200_streams(folder: Path) -> None:
    with run_server(folder, "--set", "serve.max_running=64") as server:
        check_killed(server, kill_during(server, 200), restarts=1)
        check_killed(server, kill_during(server, 200), restarts=2)


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended_and_started_again(folder: Path) -> None:
    with run_server(folder, "--set", "serve.frozen_s=1", "--set", "serve.hung_s=3") as server:
        os.kill(server.engine_pids()[0], signal.SIGSTOP)
        server.until(lambda: not server.is_ready())
        server.until(server.is_ready, 60)
        assert server.metric("restarts_total") == 1


@pytest.mark.slow
def test_requests_that_do_not_finish_within_the_grace_are_told(folder: Path) -> None:
    with run_server(folder, "--set", "serve.drain_s=1") as server:

        async def drain() -> Any:
            begun = asyncio.Event()
            task = asyncio.create_task(stream(server, LONG | {"n": 8}, begun=begun))
            await begun.wait()
            server.process.send_signal(signal.SIGTERM)
            return await task

        found = asyncio.run(drain())
        assert found.done or "shutting down" in found.error["message"]
        assert server.process.wait(30) == 0


@pytest.mark.slow
def test_two_ranks_answer_as_one(folder: Path) -> None:
    body = {"prompt": "def main", "max_tokens": 20, "temperature": 0}
    with run_server(folder) as one, run_server(folder, "--tp", "2") as two:
        assert one.post("/v1/completions", body)[1]["choices"] == two.post("/v1/completions", body)[1]["choices"]
        os.kill(two.engine_pids()[1], signal.SIGKILL)
        two.until(lambda: not two.is_ready())
        two.until(two.is_ready, 90)
        assert one.post("/v1/completions", body)[1]["choices"] == two.post("/v1/completions", body)[1]["choices"]
