"""Input that nobody well-meaning sends: each gets a clear answer or its connection closed, and others are served."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from typing import Any

import pytest

from armillary.serving.http import connections
from tests.serving.streams import request_bytes, stream
from tests.serving.tiny import Server

GOOD = {"prompt": "def main", "max_tokens": 5, "temperature": 0}


@pytest.fixture(autouse=True)
def others_are_served(server: Server) -> Any:
    yield
    status, answer = server.post("/v1/completions", GOOD)
    assert status == 200 and answer["usage"]["completion_tokens"] == 5
    assert server.metric("restarts_total") == 0 and server.is_ready()


@pytest.mark.parametrize(
    "body, status, said",
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe\xfa", 400, "not JSON"),
        (b'{"prompt": "\xc3\x28"}', 400, "not JSON"),
        (b"[" * 100_000, 400, "expected `object`"),
        (b'{"prompt": "x", "a": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", 400, "not JSON"),
        (b"[1, 2]", 400, "expected `object`"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", 400, "seed: integer value out of range"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "not JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
        (b'{"prompt": "\\ud800"}', 400, "not JSON"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [[]]}', 400, "prompt"),
        (b'{"prompt": [1, "a"]}', 400, "prompt"),
        (b'{"prompt": ["a", 1]}', 400, "prompt"),
        (b'{"prompt": "x", "n": 100000}', 400, "n: expected `int` <= 128"),
        (b'{"prompt": "x", "logprobs": 100000}', 400, "logprobs"),
        (
            b'{"prompt": "x", "stop": ["' + b'","'.join([b"a"] * 100) + b'"]}',
            400,
            "stop: expected `array` of length <= 16",
        ),
        (b'{"prompt": "x", "model": "' + b"m" * 2000 + b'"}', 400, "model"),
        (b'{"prompt": "x", "stop_token_ids": [99999999]}', 400, "outside the vocabulary"),
        (b'{"prompt": "x", "min_tokens": 100, "max_tokens": 10}', 400, "min_tokens"),
    ],
)
def test_bodies_that_cannot_be_served_are_refused_in_one_line(
    server: Server, body: bytes, status: int, said: str
) -> None:
    found, answer = server.post("/v1/completions", body)
    assert found == status and said in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_giant_body_is_not_kept(server: Server) -> None:
    found, answer = server.post("/v1/completions", b'{"prompt": "' + b"x" * 10_000_000 + b'"}')
    assert found == 413 and "max_body_bytes" in answer["error"]["message"]


def test_a_body_without_end_is_cut_off(server: Server) -> None:
    with socket.create_connection(server.address, timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while sent < 500_000_000:
                sock.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
                sent += 0x100000
        except OSError:
            pass
    assert sent < 200_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"\0" * 1000,
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 500_000 + b"\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-length: 2\r\n\r\n{}",
        b"GET /" + b"a" * 3_000_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Server, data: bytes) -> None:
    with socket.create_connection(server.address, timeout=20) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(4096)
        except OSError:
            answer = b""
    assert not answer or answer.split()[1] in (b"400", b"404", b"414", b"431"), answer


def test_other_paths_and_methods_are_named(server: Server) -> None:
    status, text, headers = server.call("GET", "/v1/completions")
    assert status == 405 and headers["allow"] == "POST" and "takes POST" in text
    assert server.get("/v2/x")[0] == 404 and server.call("HEAD", "/health")[:2] == (200, "")
    assert server.call("POST", "/health", b"{}")[0] == 405


def test_a_prompt_of_a_hundred_thousand_tokens_holds_nobody_up(server: Server) -> None:
    """Text is tokenised beside the event loop: others get their tokens meanwhile."""
    long = {"prompt": " ".join(map(str, range(150_000)))}

    async def both() -> None:
        hostile = [asyncio.create_task(stream(server, long)) for _ in range(4)]
        for _ in range(5):
            assert (await stream(server, GOOD | {"stream": True})).done
        assert {(await task).status for task in hostile} == {400}

    asyncio.run(asyncio.wait_for(both(), 120))


NASTY: dict[str, Any] = {
    "a regex of a million states": {"type": "regex", "regex": "(a?){3000}a{3000}"},
    "repeats of repeats": {"type": "regex", "regex": "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"},
    "no regex": {"type": "regex", "regex": "(["},
    "a look behind": {"type": "regex", "regex": "(?<=a)b"},
    "a choice of many": {"type": "choice", "choice": [str(i) * 20 for i in range(1000)]},
    "an ambiguous grammar": {"type": "grammar", "grammar": 'start: start start start | "x" | \n'},
    "no grammar": {"type": "grammar", "grammar": "start: ???"},
    "repeats in a grammar": {"type": "grammar", "grammar": 'start: (("x"? "y"?){0,200}){0,200}\n'},
}
SCHEMAS: dict[str, Any] = {
    "a schema of itself": {"$ref": "#"},
    "a schema elsewhere": {"$ref": "http://127.0.0.1:9/x.json"},
    "a product of options": {
        "allOf": [{"anyOf": [{"properties": {f"p{j}{i}": {"type": "string"}}} for i in range(8)]} for j in range(8)]
    },
    "a million items": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}},
    "nothing fits": {"type": "object", "minProperties": 5, "maxProperties": 2},
    "a large multiple": {"type": "integer", "multipleOf": 99_991},
    "an unknown keyword": {"type": "object", "if": {"x": 1}},
    "a wrong type": {"type": "fish"},
}


@pytest.mark.parametrize("name", [*NASTY, *SCHEMAS])
def test_structures_that_explode_are_bounded(server: Server, name: str) -> None:
    wanted = NASTY.get(name) or {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
    status, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 30, "response_format": wanted})
    assert status in (200, 400), answer
    assert status == 200 or answer["error"]["type"] == "invalid_request_error"


def test_a_schema_that_is_too_deep_or_long_is_not_compiled(server: Server) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema, said in ((deep, "levels deep"), ({"enum": ["x" * 100_000]}, "characters")):
        body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and said in answer["error"]["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    assert server.post("/v1/chat/completions", body)[0] == 400


def test_a_client_that_does_not_read_does_not_stop_others(server: Server) -> None:
    """Its tokens wait in its own buffers; the requests of others go on beside it."""
    body = {"prompt": "def", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 4, "logprobs": 20}
    with socket.create_connection(server.address, timeout=30) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request_bytes("/v1/completions", body))
        sock.recv(1)
        for _ in range(10):
            assert server.post("/v1/completions", GOOD)[0] == 200
    server.until(lambda: server.metric("running") == 0 and server.metric("inflight") == 0)


def test_half_open_connections_cost_nothing_but_a_socket(server: Server) -> None:
    socks = [socket.create_connection(server.address, timeout=30) for _ in range(150)]
    try:
        for i, sock in enumerate(socks):
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"[: 10 + i % 50])
        for _ in range(5):
            assert server.post("/v1/completions", GOOD)[0] == 200
    finally:
        for sock in socks:
            sock.close()


class FakeConnection:
    """As much of uvicorn's connection as the sweeper looks at."""

    def __init__(self, *, paused: bool, asked: bool, answered: bool = False, rests: bool = False) -> None:
        self.flow = type("Flow", (), {"write_paused": paused})()
        self.cycle = type("Cycle", (), {"response_complete": answered})() if asked else None
        self.timeout_keep_alive_task = object() if rests else None
        self.transport = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_connections_that_only_cost_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SWEEP_INTERVAL_S", "SILENT_S", "STUCK_S"):
        monkeypatch.setattr(connections, name, 0.02)
    silent, stuck, busy = (
        FakeConnection(paused=paused, asked=asked) for paused, asked in ((False, False), (True, True), (False, True))
    )
    half, rests = (FakeConnection(paused=False, asked=True, answered=True, rests=rests) for rests in (False, True))
    state = type("State", (), {"connections": {silent, stuck, busy, half, rests}})()
    server: Any = type("Server", (), {"server_state": state})()

    async def some_time() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connections.sweep(server), 0.3)

    asyncio.run(some_time())
    assert silent.aborted and stuck.aborted and not busy.aborted
    assert half.aborted and not rests.aborted  # a next request that was begun, and none


def test_a_connection_may_ask_as_often_as_it_likes(server: Server) -> None:
    """What is bounded is the head of a request, not what a connection has sent in its life."""
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    body = json.dumps({"tokens": [1] * 2500}).encode()
    for _ in range(4 * connections.HEAD_BYTES // len(body)):
        connection.request("POST", "/detokenize", body)
        response = connection.getresponse()
        assert response.status == 200 and response.read() and not response.will_close
    connection.close()


def test_the_page_of_errors_is_json_that_clients_read(server: Server) -> None:
    status, text, headers = server.call("POST", "/v1/completions", b"{}", **{"content-type": "text/plain"})
    assert status == 400 and headers["content-type"] == "application/json"
    assert json.loads(text)["error"]["message"] == "prompt is missing; add it to the request"
