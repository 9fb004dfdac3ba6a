"""Routes over ASGI with an engine that is not there: keys, states and refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.http.asgi import AsgiConnection, BodyLimits
from armillary.serving.http.problem import Problem
from armillary.serving.openai import response as reply
from armillary.serving.openai import tokenization
from armillary.serving.openai.app import Api
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.openai.tokenization import Tokenization
from armillary.serving.processes.engine_client import EngineClient
from armillary.serving.processes.engine_ipc import INDEX_BITS, EngineConfig, EngineReady, StepOutput, Submit
from armillary.serving.processes.server_metrics import Metrics
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home


def api(folder: Path, *keys: str, **settings: Any) -> Api:
    metrics, serve = Metrics(), Serve(**{"max_model_len": 100} | settings)
    config = EngineConfig(model=str(folder), serve=serve, home=Home.at(folder))
    engine = EngineClient(config, ranks=1, metrics=metrics, say=print)
    served = ServedModel(name="tiny", tokenization=Tokenization(folder, ()), engine=engine, serve=serve, context=100)
    return Api(served, metrics, keys=keys)


def call(made: Api, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON, headers) of one request."""
    return asyncio.run(ask(made, method, path, body, **headers))


async def ask(made: Api, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """The same in an event loop that runs."""
    sent: list[dict[str, Any]] = []

    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # the client stays until it is answered
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": b"", "root_path": ""}
    await made.app()(scope, receive, send)  # type: ignore[arg-type]
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
    limits = BodyLimits(limit=8, total=10, timeout_s=5.0)

    async def body(*parts: bytes, end: bool = True) -> bytes:
        left = list(parts)

        async def receive() -> dict[str, Any]:
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left) or not end}

        return await AsgiConnection({"method": "POST", "path": "/", "headers": []}, receive, receive).body(limits)

    for _ in range(3):  # what has come is given back each time
        assert asyncio.run(body(b"abc", b"def")) == b"abcdef"
        with pytest.raises(Problem, match="more than 8 bytes"):
            asyncio.run(body(b"x" * 9))
    limits._left -= 5
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


class Acting:
    """Stands in for the engine's processes: `act` is told of every request."""

    alive = True

    def __init__(self, act: Callable[[Submit], None]) -> None:
        self._act = act

    def send(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._act(message)


def acting(made: Api, act: Callable[[Submit], None]) -> Api:
    """An engine that is ready, and does what `act` does."""
    engine = made.served.engine
    engine._ranks = Acting(act)  # type: ignore[assignment]
    engine.started = EngineReady(max_model_len=300, kv_tokens=1000, kv_text="", phases=[])
    engine.state = "ready"
    return made


def finishes(made: Api) -> dict[str, int]:
    return {name: count for name, count in made.metrics.finished.items() if count}


def test_the_servers_own_time_is_504_and_the_clients_408(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives requests up at their time; where it does not even do that, the server does."""
    monkeypatch.setattr(reply, "_GRACE_S", 0.01)

    def gives_up(message: Submit) -> None:
        made.served.engine._take_output(StepOutput(ends=[(message.number << INDEX_BITS, "deadline", "", {})]))

    for act in (gives_up, lambda message: None):
        made = acting(api(folder, timeout_s=0.05), act)
        status, answer, _ = call(made, "POST", "/v1/completions", b'{"prompt": "def"}')
        assert status == 504 and "longer than 0.05 s" in answer["error"]["message"]
        status, answer, _ = call(made, "POST", "/v1/completions", b'{"prompt": "def", "timeout_s": 0.02}')
        assert status == 408 and answer["error"]["code"] == "timeout"
        assert finishes(made) == {"deadline": 2} and made.metrics.inflight == 0


@pytest.mark.parametrize(
    ("tokens", "limits", "longest"),
    [(10, {}, 16), (10, {"max_answer": 5}, 5), (297, {}, 3), (297, {"max_answer": 2}, 2)],
)
def test_who_asks_for_no_length_gets_what_there_is_room_for(
    folder: Path, tokens: int, limits: dict[str, int], longest: int
) -> None:
    """A completion without max_tokens has OpenAI's 16, and is no error where those are too many."""
    seen: list[int | None] = []

    def ends(message: Submit) -> None:
        seen.append(message.params.max_tokens)
        made.served.engine._take_output(StepOutput(ends=[(message.number << INDEX_BITS, "length", "", {})]))

    made = acting(api(folder, **limits), ends)
    body = json.dumps({"prompt": [[5] * tokens, [6] * 4]}).encode()
    assert call(made, "POST", "/v1/completions", body)[0] == 200 and seen == [longest] * 2


def test_answers_are_counted_by_the_ends_their_clients_see(folder: Path) -> None:
    """A call of a tool is one to the server alone: to the engine it is text that stopped."""
    made = api(folder, max_model_len=300)
    object.__setattr__(made.served, "tools", "hermes")
    assert made.served.tokenization.tokenizer is not None
    ids = made.served.tokenization.tokenizer.encode(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>', special=False
    )

    def calls(message: Submit) -> None:
        key = message.number << INDEX_BITS
        for token in ids:
            made.served.engine._take_output(StepOutput(keys=[key], tokens=[token]))
        made.served.engine._take_output(StepOutput(ends=[(key, "stop", "", {"tokens_in": 3})]))

    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    acting(made, calls)
    _, answer, _ = call(made, "POST", "/v1/chat/completions", json.dumps(asked | tools).encode())
    assert answer["choices"][0]["finish_reason"] == "tool_calls" and finishes(made) == {"tool_calls": 1}
    call(made, "POST", "/v1/chat/completions", json.dumps(asked).encode())
    assert finishes(made) == {"tool_calls": 1, "stop": 1}
    page = made.metrics.page().decode()
    assert 'armillary_requests_total{finish="tool_calls"} 1.0' in page and "armillary_tokens_in_count 2.0" in page


def test_a_stop_text_that_is_complete_only_at_the_end_still_ends_the_answer(folder: Path) -> None:
    """Half a character is held back until it is certain that no other half comes."""
    made = api(folder)
    half = next(token for token in range(320) if made.served.tokenization.token_text(token)[1] == (0xE6,))

    def cut(message: Submit) -> None:
        key = message.number << INDEX_BITS
        made.served.engine._take_output(StepOutput(keys=[key], tokens=[half], ends=[(key, "length", "", {})]))

    acting(made, cut)
    for stop, finish, text in ((["\ufffd"], "stop", ""), (["x"], "length", "\ufffd")):
        body = json.dumps({"prompt": "def", "max_tokens": 1, "stop": stop}).encode()
        _, answer, _ = call(made, "POST", "/v1/completions", body)
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == (finish, text)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(folder: Path, fields: dict[str, Any], param: str) -> None:
    made = acting(api(folder), lambda message: pytest.fail("it was sent to the engine"))
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    status, answer, _ = call(made, "POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == param and finishes(made) == {}


def test_long_prompts_do_not_wait_for_tokenize(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many texts without end at /tokenize: a prompt has threads of its own, and few may wait at /tokenize."""
    monkeypatch.setattr(tokenization, "_MAX_TOKENIZE_ONLY", 3)
    made, gate = Tokenization(folder, ()), threading.Event()

    async def scenario() -> None:
        stuck = [asyncio.create_task(made.work(gate.wait, tokenize_only=True)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="try again later") as problem:
            await made.encode("x" * 5000, 10_000, "prompt", tokenize_only=True)
        assert problem.value.status == 429
        assert len(await asyncio.wait_for(made.encode("x" * 5000, 10_000, "prompt"), 20)) > 1000
        gate.set()
        assert await asyncio.gather(*stuck) == [True] * 3
        assert await made.encode("x" * 5000, 10_000, "prompt", tokenize_only=True)

    try:
        asyncio.run(scenario())
    finally:
        gate.set()


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/models/a/b", "/v1/models/"])
def test_another_model_is_not_here(folder: Path, path: str) -> None:
    status, answer, _ = call(api(folder), "GET", path)
    assert status == 404 and "use 'tiny'" in answer["error"]["message"]


def test_templates_of_requests_are_rendered_where_they_are_trusted(folder: Path) -> None:
    text = "{% for message in messages %}<{{ message.content }}>{% endfor %}{{ 'go' if add_generation_prompt }}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "chat_template": text}
    trusting = api(folder, trust_request_chat_template=True)
    status, answer, _ = call(trusting, "POST", "/tokenize", json.dumps(body).encode())
    assert status == 200 and trusting.served.tokenization.decode(answer["tokens"]) == "<a>go"
    status, answer, _ = call(api(folder), "POST", "/tokenize", json.dumps(body).encode())
    assert status == 400 and "serve.trust_request_chat_template=true" in answer["error"]["message"]
    hidden = body | {"chat_template": None, "chat_template_kwargs": {"chat_template": text}}
    assert call(api(folder), "POST", "/tokenize", json.dumps(hidden).encode())[0] == 400
    for wrong in ("{{", "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
        status, answer, _ = call(trusting, "POST", "/tokenize", json.dumps(body | {"chat_template": wrong}).encode())
        assert status == 400 and "template" in answer["error"]["message"], wrong
