"""Routes over ASGI with an engine that is not there: keys, states and refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.api.app import Api
from armillary.serving.api.channel import Orders
from armillary.serving.api.engine_process import EngineProcess
from armillary.serving.api.exchange import Budget, Exchange
from armillary.serving.api.metrics import Metrics
from armillary.serving.api.problem import Problem
from armillary.serving.api.served import Served
from armillary.serving.api.texts import Texts
from armillary.spec.service import Serve
from armillary.store.home import Home


def api(folder: Path, *keys: str) -> Api:
    metrics, serve = Metrics(), Serve(max_model_len=100)
    orders = Orders(model=str(folder), serve=serve, home=Home.at(folder))
    engine = EngineProcess(orders, ranks=1, metrics=metrics, say=print)
    served = Served(name="tiny", texts=Texts(folder, ()), engine=engine, serve=serve, context=100)
    return Api(served, metrics, keys=keys)


def call(made: Api, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON, headers) of one request."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": b"", "root_path": ""}
    asyncio.run(made.app()(scope, receive, send))  # type: ignore[arg-type]
    text = b"".join(message.get("body", b"") for message in sent[1:])
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(text) if "json" in found["content-type"] else text, found


def test_keys_open_what_is_locked(folder: Path) -> None:
    made = api(folder, "first", "second")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x_api_key": ""}):
        status, answer, _ = call(made, "GET", "/v1/models", **headers)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    for headers in ({"authorization": "Bearer second"}, {"authorization": "bearer first"}, {"x_api_key": "first"}):
        assert call(made, "GET", "/v1/models", **headers)[0] == 200
    assert call(made, "POST", "/v1/completions", b"{}")[0] == 401
    assert [call(made, "GET", path)[0] for path in ("/health", "/metrics", "/", "/openapi.json")] == [200] * 4


def test_while_the_model_is_loaded_it_is_alive_and_not_ready(folder: Path) -> None:
    made = api(folder)
    status, answer, headers = call(made, "POST", "/v1/completions", b'{"prompt": "x"}')
    assert status == 503 and "being loaded" in answer["error"]["message"] and int(headers["retry-after"]) >= 1
    assert call(made, "GET", "/ready")[0] == 503 and call(made, "GET", "/health")[0] == 200
    made.draining = True
    assert call(made, "GET", "/ready")[1]["reason"] == "the server is shutting down"
    assert call(made, "POST", "/v1/chat/completions", b"{}")[1]["error"]["code"] == "shutting_down"


def test_bodies_on_their_way_have_a_bound_together() -> None:
    budget = Budget(10)

    async def body(*parts: bytes, end: bool = True) -> bytes:
        left = list(parts)

        async def receive() -> dict[str, Any]:
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left) or not end}

        return await Exchange({"method": "POST", "path": "/", "headers": []}, receive, receive).body(8, budget)

    for _ in range(3):  # what has come is given back each time
        assert asyncio.run(body(b"abc", b"def")) == b"abcdef"
        with pytest.raises(Problem, match="more than 8 bytes"):
            asyncio.run(body(b"x" * 9))
    budget.take(5)
    with pytest.raises(Problem, match="too many bodies") as problem:
        asyncio.run(body(b"abc", b"def"))
    assert problem.value.status == 429 and problem.value.headers == [(b"retry-after", b"2")]


def test_tokens_need_no_engine(folder: Path) -> None:
    made = api(folder)
    _, found, _ = call(made, "POST", "/tokenize", b'{"prompt": "def main", "return_token_strs": true}')
    assert len(found["tokens"]) == found["count"] == len(found["token_strs"]) and found["max_model_len"] == 100
    back = call(made, "POST", "/detokenize", json.dumps({"tokens": found["tokens"][1:]}).encode())
    assert back[1] == {"prompt": "def main"}
    assert call(made, "POST", "/tokenize", b"{}")[0] == 400


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/models/a/b", "/v1/models/"])
def test_another_model_is_not_here(folder: Path, path: str) -> None:
    status, answer, _ = call(api(folder), "GET", path)
    assert status == 404 and "use 'tiny'" in answer["error"]["message"]
