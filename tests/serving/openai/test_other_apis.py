"""Anthropic's /v1/messages and OpenAI's /v1/responses: the same chat in other words, complete and as events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from armillary.serving.openai.app import Api
from armillary.serving.processes.engine_ipc import INDEX_BITS, StepOutput, Submit
from tests.serving.openai.test_app import acting, api, call

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def says(folder: Path, text: str, finish: str = "stop") -> Api:
    """A server whose model answers with this text."""
    made = api(folder, max_model_len=300)
    object.__setattr__(made.served, "tools", "hermes")
    object.__setattr__(made.served, "reasoning", "think")
    assert made.served.tokenization.tokenizer is not None
    ids = made.served.tokenization.tokenizer.encode(text, special=False)

    def act(message: Submit) -> None:
        key = message.number << INDEX_BITS
        for token in ids:
            made.served.engine._take_output(StepOutput(keys=[key], tokens=[token]))
        made.served.engine._take_output(StepOutput(ends=[(key, finish, "", {"tokens_in": 3})]))

    return acting(made, act)


def post(made: Api, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = call(made, "POST", path, json.dumps(body).encode())
    assert status == 200, answer
    return answer


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Events, whose names are those of their data."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# --- Anthropic

ASK: dict[str, Any] = {"max_tokens": 100, "messages": [{"role": "user", "content": "x"}]}
TOOLS = {"tools": [{"name": "f", "input_schema": SCHEMA}]}


def test_a_message(folder: Path) -> None:
    message = post(says(folder, "<think>hm</think>well"), "/v1/messages", ASK | {"system": "be brief"})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("hm", "well")
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
    assert message["usage"]["output_tokens"] > 0 and message["usage"]["input_tokens"] > 0
    assert post(says(folder, "wel", "length"), "/v1/messages", ASK)["stop_reason"] == "max_tokens"
    used = post(says(folder, CALL), "/v1/messages", ASK | TOOLS)
    assert used["stop_reason"] == "tool_use" and used["content"][0]["input"] == {"x": 1}


def test_a_message_as_events(folder: Path) -> None:
    data = post(says(folder, f"let me see {CALL}"), "/v1/messages", ASK | TOOLS | {"stream": True})
    events = events_of(data)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["text", "tool_use"]
    assert [event["index"] for event in starts] == [0, 1] and kinds.count("content_block_stop") == 2
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert text.strip() == "let me see"
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 0


def test_a_conversation_with_results_of_tools(folder: Path) -> None:
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "see"}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    answer = post(says(folder, "two"), "/v1/messages", ASK | TOOLS | {"messages": messages, "max_tokens": 20})
    assert answer["content"][0]["text"] == "two"
    for content in ([{"type": "image"}], [{"type": "tool_use"}], [{"type": "tool_result"}], [{"type": "text"}]):
        made = says(folder, "x")
        asked = ASK | {"messages": [{"role": "user", "content": content}]}
        status, answer, _ = call(made, "POST", "/v1/messages", json.dumps(asked).encode())
        assert status == 400 and "messages[0].content" in answer["error"]["message"]


def test_tokens_are_counted_as_a_message_counts_them(folder: Path) -> None:
    asked = ASK | TOOLS | {"system": "be brief"}
    used = post(says(folder, "x"), "/v1/messages", asked)["usage"]
    prompt = {name: value for name, value in asked.items() if name != "max_tokens"}
    counted = post(says(folder, "x"), "/v1/messages/count_tokens", prompt)
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    without = post(says(folder, "x"), "/v1/messages/count_tokens", prompt | {"tool_choice": {"type": "none"}})
    assert without["input_tokens"] < counted["input_tokens"]


# --- OpenAI's responses

RESPOND: dict[str, Any] = {"input": "x", "instructions": "be brief"}
FUNCTIONS = {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}


def test_a_response(folder: Path) -> None:
    response = post(says(folder, "well"), "/v1/responses", RESPOND)
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"][0]["content"][0]["text"] == "well"
    assert post(says(folder, "wel", "length"), "/v1/responses", RESPOND)["status"] == "incomplete"
    used = post(says(folder, CALL), "/v1/responses", RESPOND | FUNCTIONS)
    assert (used["output"][0]["type"], used["output"][0]["arguments"]) == ("function_call", '{"x": 1}')
    import openai.types.responses as openai

    assert openai.Response.model_validate(used).usage.output_tokens > 0


def test_a_response_as_events(folder: Path) -> None:
    data = post(says(folder, f"see {CALL}"), "/v1/responses", RESPOND | FUNCTIONS | {"stream": True})
    events = events_of(data)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert text == done["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert "response.function_call_arguments.done" in kinds and kinds.count("response.output_item.done") == 2


def test_reasoning_is_an_item_of_its_own(folder: Path) -> None:
    """As a client of OpenAI's reads it, complete and as events; it may be sent back with the conversation."""
    import openai.types.responses as openai
    from pydantic import TypeAdapter

    text = "<think>two and two</think>four"
    whole = post(says(folder, text), "/v1/responses", RESPOND)
    first, second = openai.Response.model_validate(whole).output
    assert first.type == "reasoning" and first.content and first.content[0].text == "two and two"
    assert second.type == "message" and second.content[0].text == "four"
    events = events_of(post(says(folder, text), "/v1/responses", RESPOND | {"stream": True}))
    for event in events:
        TypeAdapter(openai.ResponseStreamEvent).validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    said = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert said == "two and two" and [item["type"] for item in events[-1]["response"]["output"]] == [
        "reasoning",
        "message",
    ]
    again = [{"role": "user", "content": "x"}, *whole["output"], {"role": "user", "content": "and now?"}]
    assert post(says(folder, "x"), "/v1/responses", {"input": again})["status"] == "completed"


def test_items_of_a_conversation_and_what_is_refused(folder: Path) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    assert post(says(folder, "two"), "/v1/responses", {"input": items})["status"] == "completed"
    for body in (
        {"input": [{"type": "image"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"type": "reasoning"}]},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "truncation": "auto"},
    ):
        assert call(says(folder, "x"), "POST", "/v1/responses", json.dumps(body).encode())[0] == 400
