"""Replicas that work, die, hang and refuse: what clients see, and which replica gets the next request."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.audit import usage_by_client
from armillary.fleet.gateway.gateway_config import GatewaySettings
from tests.fleet.gateway.replicas import CHUNK, FakeReplica, gateway_of, scenario, until

ASK: dict[str, Any] = {"model": "bot", "prompt": "hello"}
STREAM = ASK | {"stream": True}


@scenario
async def test_a_complete_response_and_a_stream_pass_through(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        answer = await client.post(ASK)
        assert (answer.status, answer.json["choices"][0]["text"]) == (200, "toktoktok")
        streamed = await client.post(STREAM)
        assert streamed.text == CHUNK * 3 + "data: [DONE]\n\n", "counts that the client did not ask for are not shown"
        assert streamed.headers["content-type"] == "text/event-stream" and streamed.headers["x-accel-buffering"] == "no"
        asked = await client.post(STREAM | {"stream_options": {"include_usage": True}})
        assert '"completion_tokens": 3' in asked.text
        assert [body.get("stream_options") for body in replica.bodies] == [None, *[{"include_usage": True}] * 2]
        assert [line["completion_tokens"] for line in client.lines()] == [3, 3, 3]
        assert len({head.split("x-request-id: ")[1].split("\r\n")[0] for head in replica.heads}) == 3


@scenario
async def test_tokens_and_dollars_are_accounted_for(tmp_path: Path) -> None:
    prices = {"input_usd_per_million": 2.0, "output_usd_per_million": 10.0}
    async with gateway_of(tmp_path, FakeReplica(tokens=3), **prices) as client:
        for body in (ASK, STREAM, ASK | {"model": "nope"}):
            await client.post(body)
        assert client.lines()[0]["usd"] == pytest.approx(40e-6)
        page = (await client.get("/metrics")).text
        assert 'armillary_gateway_tokens_total{key="",model="bot",kind="completion"} 6' in page
        assert 'armillary_gateway_usd_total{key="",model="bot"} 8e-05' in page
        assert "armillary_gateway_added_seconds_count 2" in page
        with client.audit.open("a") as file:
            file.write('{"cut off')
        totals = usage_by_client(client.audit)
        assert totals["", "bot"] | {"usd": 0} == {
            "requests": 2, "errors": 0, "prompt_tokens": 10, "completion_tokens": 6, "usd": 0
        }  # fmt: skip
        assert totals["", "nope"]["errors"] == 1


@scenario
async def test_tokens_are_passed_on_one_by_one(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, FakeReplica(tokens=5, gap_s=0.03)) as client:
        assert len((await client.post(STREAM)).parts) >= 5


@scenario
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(tmp_path: Path) -> None:
    bad, good = FakeReplica(status=500), FakeReplica()
    async with gateway_of(tmp_path, bad, good) as client:
        answers = [await client.post(ASK) for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        assert len(bad.bodies) == 3, "three failures in a row open its circuit"
        assert {line["attempts"] for line in client.lines()} == {1, 2}


@scenario
async def test_a_busy_replica_passes_its_request_on_and_stays_in_rotation(tmp_path: Path) -> None:
    busy, free = FakeReplica(status=429), FakeReplica()
    async with gateway_of(tmp_path, busy, free) as client:
        assert [(await client.post(ASK)).status for _ in range(8)] == [200] * 8
        assert len(busy.bodies) >= 4


@scenario
async def test_after_the_first_token_an_error_ends_the_stream(tmp_path: Path) -> None:
    dying, spare = FakeReplica(tokens=9, dies_after=2), FakeReplica()
    async with gateway_of(tmp_path, dying, spare, policy="least-load") as client:
        client.models.find("bot")[1].replicas[1].in_flight = 5
        answer = await client.post(STREAM)
        assert (answer.status, len(dying.bodies), len(spare.bodies)) == (200, 1, 0), "not retried"
        assert answer.text.startswith(CHUNK * 2) and "the replica failed in the middle of its answer" in answer.text
        assert "[DONE]" not in answer.text
        for path in ("/v1/messages", "/v1/responses"):  # whose clients pass over events without a name
            answer = await client.post(STREAM, path)
            last = answer.text.rstrip("\n").rpartition("\n\n")[2].split("\n")
            assert last[0] == "event: error" and json.loads(last[1].removeprefix("data: "))["type"] == "error"


@scenario
async def test_a_replica_that_hangs_never_hangs_a_client(tmp_path: Path) -> None:
    silent, stuck = FakeReplica(hangs=True), FakeReplica(tokens=9, hangs_after=1)
    timeouts = {"first_token_timeout_s": 0.3, "idle_timeout_s": 0.3}
    async with gateway_of(tmp_path, silent, stuck, gateway=timeouts) as client:
        client.models.find("bot")[1].replicas[1].last_pick = 1
        begin = time.monotonic()
        answer = await client.post(STREAM)
        assert "it was silent for too long" in answer.text and answer.text.startswith(CHUNK)
        assert time.monotonic() - begin < 5
        await until(lambda: stuck.disconnected == 1 and silent.disconnected == 1)


@scenario
async def test_a_kept_connection_that_falls_silent_is_not_tried_twice(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica, gateway={"first_token_timeout_s": 0.3}) as client:
        assert (await client.post(ASK)).status == 200
        replica.hangs = True
        answer = await client.post(ASK)
        assert answer.status == 502 and "it was silent for too long" in answer.message
        await until(lambda: replica.disconnected == 1)
        assert client.models.replicas()[0][1].failures == 1


@scenario
async def test_a_client_that_leaves_ends_the_request_at_the_replica(tmp_path: Path) -> None:
    slow, silent = FakeReplica(tokens=9, hangs_after=2), FakeReplica(hangs=True)
    async with gateway_of(tmp_path, slow) as client:
        await client.post(STREAM, leaves_after=1)
        await until(lambda: slow.disconnected == 1)
        assert client.lines()[0]["status"] == 499
        assert client.models.replicas()[0][1].failures == 0, "no fault of the replica"
    async with gateway_of(tmp_path / "b", silent) as client:
        await client.post(ASK, leaves_after=0)
        await until(lambda: silent.disconnected == 1)


@scenario
async def test_a_dead_replica_leaves_the_rotation_and_comes_back(tmp_path: Path) -> None:
    first, second = FakeReplica(), FakeReplica()
    checks = {"health_interval_s": 0.02, "health_timeout_s": 5.0, "connect_timeout_s": 5.0}
    async with gateway_of(tmp_path, first, second, gateway=checks, health=True) as client:
        await first.stop()
        replica = client.models.replicas()[0][1]
        await until(lambda: replica.breaker.retry_at is not None)
        assert any("gets no requests: it cannot be reached" in line for line in client.said)
        assert [(await client.post(ASK)).status for _ in range(4)] == [200] * 4 and first.bodies == []
        assert [line["attempts"] for line in client.lines()] == [1] * 4
        assert (await client.get("/ready")).json["replicas_up"] == {"bot": 1}
        await first.start()
        await until(lambda: replica.breaker.retry_at is None)
        assert client.said[-1].endswith("gets requests")
        for _ in range(4):
            await client.post(ASK)
        assert len(first.bodies) == 2


@scenario
async def test_a_drained_replica_may_end_without_a_word(tmp_path: Path) -> None:
    """It got no requests anyway: the autoscaler stopped it."""
    first, second = FakeReplica(), FakeReplica()
    async with gateway_of(tmp_path, first, second, gateway={"health_interval_s": 0.02}, health=True) as client:
        replica = client.models.replicas()[0][1]
        replica.drained = True
        await first.stop()
        await until(lambda: replica.breaker.retry_at is not None)
        assert client.said == []
        replica.drained = False
        await until(lambda: bool(client.said))
        assert "gets no requests: it cannot be reached" in client.said[0]


@scenario
async def test_a_gateway_starts_before_its_replicas(tmp_path: Path) -> None:
    late = FakeReplica()
    async with gateway_of(tmp_path, late, FakeReplica(), gateway={"health_timeout_s": 0.5}) as client:
        await late.stop()
        await client.health.first_round()
        assert (await client.get("/ready")).json["replicas_up"] == {"bot": 1}, "known before the first request"
        assert [(await client.post(ASK)).status for _ in range(3)] == [200] * 3
        assert [line["attempts"] for line in client.lines()] == [1] * 3
        await late.start()
        assert await client.health.check(*client.models.replicas()[0])
        assert (await client.get("/ready")).json["replicas_up"] == {"bot": 2}


@scenario
async def test_a_hung_engine_behind_a_port_that_answers_is_noticed(tmp_path: Path) -> None:
    """Servers without /ready get a completion of one token, as /v1/models answers while their engine hangs."""
    replica = FakeReplica(has_ready=False, status=500)
    checks = {"health_interval_s": 0.02, "health_timeout_s": 0.2}
    async with gateway_of(tmp_path, replica, gateway=checks, health=True) as client:
        state = client.models.replicas()[0][1]
        await until(lambda: state.breaker.retry_at is not None)
        assert replica.bodies[0]["max_tokens"] == 1
        replica.status = 200
        await until(lambda: state.breaker.retry_at is None)


@scenario
async def test_requests_at_a_replica_that_hangs_are_answered_by_another(tmp_path: Path) -> None:
    """As soon as health checks notice it, long before the time limit of a response; and no client tries it again."""
    hung, spare = FakeReplica(hangs=True), FakeReplica()
    checks = {"health_interval_s": 0.02, "health_timeout_s": 0.4, "first_token_timeout_s": 60.0}
    async with gateway_of(tmp_path, hung, spare, gateway=checks, health=True) as client:
        client.models.replicas()[1][1].last_pick = 1
        assert (await client.post(ASK)).status == 200
        assert [(line["attempts"], line["replica"]) for line in client.lines()] == [(2, "bot/1")]
        client.models.replicas()[0][1].breaker.retry_at = 0.0
        assert [(await client.post(ASK)).status for _ in range(4)] == [200] * 4
        assert {line["attempts"] for line in client.lines()[1:]} == {1}


@scenario
async def test_a_busy_replica_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    """Health checks that are not answered count only while nothing else arrives from the replica."""
    replica = FakeReplica(tokens=40, gap_s=0.02, silent_checks=True)
    checks = {"health_interval_s": 0.02, "health_timeout_s": 0.4}
    async with gateway_of(tmp_path, replica, gateway=checks, health=True) as client:
        breaker = client.models.replicas()[0][1].breaker
        assert (await client.post(STREAM)).text.count("tok") == 40 and breaker.retry_at is None
        begin = time.monotonic()
        await until(lambda: breaker.retry_at is not None)
        assert time.monotonic() - begin < 5
    settings = GatewaySettings()
    assert 2 * (settings.health_interval_s + settings.health_timeout_s) < 5, "a replica that hangs is out by then"


@scenario
async def test_a_fallback_model_answers_where_no_replica_works(tmp_path: Path) -> None:
    down, small = FakeReplica(status=500), FakeReplica()
    await small.start()
    other = [{"name": "small", "replicas": [{"url": small.url, "model": "tiny-v2"}]}]
    async with gateway_of(tmp_path, down, fallback="small", more_models=other) as client:
        assert (await client.post(ASK)).status == 200
        assert small.bodies[0]["model"] == "tiny-v2"
        assert client.lines()[0]["answered_by"] == "small"
    await small.stop()


@scenario
async def test_no_replica_left(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, FakeReplica(status=500)) as client:
        answer = await client.post(ASK)
        assert answer.status == 502 and answer.message.startswith(
            "no replica of 'bot' could answer (bot/0 answered 500"
        )
        for _ in range(3):
            await client.post(ASK)
        answer = await client.post(ASK)
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")


@scenario
async def test_a_kept_connection_that_the_server_closed_is_replaced(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        assert (await client.post(ASK)).status == 200
        await replica.stop()
        await replica.start()
        assert (await client.post(ASK)).status == 200
        assert client.models.replicas()[0][1].failures == 0


@scenario
async def test_events_of_other_apis_are_never_taken_out(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        streamed = await client.post(STREAM | {"stream_options": {"include_usage": True}}, "/v1/messages")
        assert '"completion_tokens": 3' in streamed.text


@scenario
async def test_a_replica_that_refuses_the_gateways_key_is_no_matter_of_the_client(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, FakeReplica(status=401)) as client:
        refused = await client.post(ASK)
        assert refused.status == 502 and "refused the gateway's own key" in refused.message


@scenario
async def test_a_redirect_is_neither_followed_nor_passed_on(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, FakeReplica(status=307)) as client:
        refused = await client.post(ASK)
        assert refused.status == 502 and "answered 307" in refused.message and "location" not in refused.headers


@scenario
async def test_bytes_that_nobody_asked_for_close_a_kept_connection(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with gateway_of(tmp_path, replica) as client:
        assert (await client.post(ASK)).status == 200
        (writer,) = replica.connections.values()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nXX")
        await until(lambda: not replica.connections)
        assert (await client.post(ASK)).json["choices"][0]["text"] == "toktoktok"


@scenario
async def test_half_of_a_complete_response_is_not_made_to_look_whole(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, FakeReplica(dies_in_body=True)) as client:
        answer = await client.post(ASK)
        assert answer.status == 200 and "error" not in answer.text, "the server closes the connection instead"
        assert client.lines()[0]["attempts"] == 1, "nor is it tried again"


@scenario
async def test_the_log_says_once_that_a_replica_is_out_whoever_notices_first(tmp_path: Path) -> None:
    bad, good = FakeReplica(status=500), FakeReplica()
    async with gateway_of(tmp_path, bad, good, gateway={"health_timeout_s": 5.0}) as client:
        pair = client.models.replicas()[0]
        for _ in range(6):
            await client.post(ASK)
        assert pair[1].breaker.retry_at is not None, "found by requests: its checks pass"
        for _ in range(3):
            await client.health.check(*pair)
        assert client.said == [f"{bad.url} gets no requests: requests to it fail"]
        pair[1].breaker.retry_at = 0.0  # its pause is over
        await client.health.check(*pair)
        assert client.said[1:] == [f"{bad.url} gets requests"]
