"""Anthropic's own client, unchanged, against the server and through a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.keys import KeyFile
from tests.fork_server import shared
from tests.serving.tiny import Server, run_server

pytestmark = pytest.mark.peers
ASK: dict[str, Any] = {
    "model": "bot",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "def main"}],
    "extra_body": {"temperature": 0.0},  # which newer versions of the client do not name
}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
TOOL = {"name": "lookup", "description": "finds x", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with run_server(folder, "--set", "serve.name=bot", "--set", "serve.reasoning=think") as running:
        yield running


@pytest.fixture(scope="module", params=["server", "gateway"])
def client(server: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    if request.param == "server":
        yield anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
        return
    home = tmp_path_factory.mktemp("home")
    _, key = KeyFile(home / "gateway" / "keys.json").add("alice", limits={"tokens": 100_000})
    log = home / "gateway.out"
    process = shared().start(
        ["gateway", "--upstream", f"bot={server.url}", "--port", "0", "--home", str(home)], log, cwd=home
    )
    try:
        end = time.monotonic() + 60
        while "ready on http" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        url = log.read_text().partition("ready on ")[2].split()[0]
        yield anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    finally:
        process.kill()
        process.wait(30)


def test_a_message_and_its_stream_are_the_same(client: Any) -> None:
    whole = client.messages.create(**ASK, system="be brief")
    with client.messages.stream(**ASK, system="be brief") as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason and whole.role == "assistant"
    tokens = [each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (whole, streamed)]
    assert tokens[0] == tokens[1] > 0 and whole.usage.output_tokens == streamed.usage.output_tokens


def test_tokens_are_counted(client: Any) -> None:
    asked = {"model": "bot", "messages": ASK["messages"], "tools": [TOOL]}
    used = client.messages.create(**ASK, tools=[TOOL]).usage
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_tool_is_used_and_its_result_sent_back(client: Any) -> None:
    asked = ASK | {"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "lookup"}}
    message = client.messages.create(**asked)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and use.name == "lookup" and use.input["x"] in (1, 2)
    with client.messages.stream(**asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input["x"] in (1, 2)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
    turns = [*ASK["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASK | {"messages": turns, "tools": [TOOL]}).usage.output_tokens > 0


def test_errors_are_those_of_the_client(client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASK | {"model": "nope"})
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(**ASK | {"messages": []})
    assert [model.id for model in client.models.list()] == ["bot"]
