"""OpenAI's own client against the server: it works unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.tiny import CONTEXT, Server

HELLO: list[Any] = [{"role": "user", "content": "def main"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "…",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Bonn", "Ulm"]}, "days": {"$ref": "#/$defs/few"}},
                "required": ["town", "days"],
                "additionalProperties": False,
                "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    }
    for name in ("weather", "news")
]
PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_a_chat_is_answered_and_counted(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    choice, usage = answer.choices[0], answer.usage
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and choice.message.content
    assert usage.completion_tokens == 12 and usage.total_tokens == usage.prompt_tokens + 12
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"


def test_a_stream_says_the_same_piece_by_piece(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole and len(texts) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == "length" and set(ends[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1


def test_several_answers_with_seeds(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "n": 3, "seed": -7}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
    assert first.usage.completion_tokens == 24
    streamed = {i: "" for i in range(3)}
    for chunk in client.chat.completions.create(**fields, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [streamed[i] for i in range(3)] == texts


def test_stop_texts_end_an_answer_and_are_not_part_of_it(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    stop = whole[5:8]
    cut = client.chat.completions.create(**fields, stop=[stop, "never there"])
    assert cut.choices[0].message.content == whole[: whole.find(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40
    streamed = client.chat.completions.create(**fields, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole[: whole.find(stop)]


def test_log_probabilities_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4) for entry in content)
    text = bytes(byte for entry in content for byte in entry.bytes).decode("utf-8", "replace")
    assert text == answer.choices[0].message.content


def test_a_biased_token_always_comes(client: Any, server: Server) -> None:
    (token,) = server.post("/tokenize", {"prompt": "7", "add_special_tokens": False})[1]["tokens"]
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, logit_bias={str(token): 100}, temperature=0
    )
    assert answer.choices[0].message.content == "77777"


def test_answers_match_a_schema(client: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=wanted, max_tokens=200, seed=1, temperature=0.5
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120 and answer.choices[0].finish_reason == "stop"
    listed = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=300,
        seed=2,
        temperature=0.01,
        logit_bias={},
    )
    assert listed.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "wanted, check",
    [
        ({"type": "regex", "regex": "[ab]{3}-[0-9]"}, lambda text: text[3] == "-" and text[4].isdigit()),
        ({"type": "choice", "choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"type": "grammar", "grammar": 'start: "x" "y"+ "z"'}, lambda text: text.replace("y", "") == "xz"),
    ],
)
def test_answers_match_expressions_choices_and_grammars(server: Server, wanted: Any, check: Any) -> None:
    body = {"prompt": "def", "response_format": wanted, "max_tokens": 60, "seed": 4, "logit_bias": {}}
    status, answer = server.post("/v1/completions", body)
    assert status == 200 and check(answer["choices"][0]["text"]), answer


def test_a_call_that_is_asked_for_comes_with_arguments_that_fit(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 200, "seed": 3}
    forced = {"type": "function", "function": {"name": "news"}}
    named = client.chat.completions.create(**fields, tool_choice=forced).choices[0]
    (call,) = named.message.tool_calls
    assert call.function.name == "news" and call.type == "function" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert arguments["town"] in ("Bonn", "Ulm") and 1 <= arguments["days"] <= 9 and named.message.content is None
    some = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert some.finish_reason == "tool_calls" and some.message.tool_calls[0].function.name in ("weather", "news")
    streamed = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(
            **fields, tool_choice="required", parallel_tool_calls=False, stream=True
        )
    ]
    calls = [call for choice in streamed for call in choice.delta.tool_calls or ()]
    assert calls[0].function.name == some.message.tool_calls[0].function.name and calls[0].index == 0
    assert streamed[-1].finish_reason == "tool_calls"


def test_a_call_that_the_model_writes_by_itself_is_found(client: Any) -> None:
    """The tiny model is held to the text of a call, as a tuned one would write it; its template says `<tool_call>`."""
    text = 'Well. <tool_call>{"name": "weather", "arguments": {"town": "Ulm", "days": 2}}</tool_call>'
    body = {"tools": TOOLS, "messages": HELLO, "max_tokens": 200, "model": "tiny"}
    forced = {"type": "regex", "regex": text.replace("{", "[{]").replace("}", "[}]").replace(".", "[.]")}
    found = client.chat.completions.create(**body, extra_body={"response_format": forced}).choices[0]
    assert found.message.content == "Well." and found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Ulm", "days": 2})
    streamed = list(client.chat.completions.create(**body, extra_body={"response_format": forced}, stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert said.strip() == "Well." and streamed[-1].choices[0].finish_reason == "tool_calls"
    quiet = body | {"tool_choice": "none"}
    plain = client.chat.completions.create(**quiet, extra_body={"response_format": forced}).choices[0]
    assert plain.message.content == text and not plain.message.tool_calls


def test_a_conversation_with_calls_and_parts_goes_through_the_template(client: Any, server: Server) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    ids = server.post("/tokenize", {"messages": messages})[1]["tokens"]
    text = server.post("/detokenize", {"tokens": ids})[1]["prompt"]
    assert text.startswith("[system] Be brief.\n[user] weather?\n")
    assert '{"name": "weather", "arguments": {"town": "Ulm"}}' in text
    assert text.endswith("[tool] rain\n[assistant] ")
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=3)
    assert answer.usage.prompt_tokens > len(ids)


def test_completions_of_texts_and_ids(client: Any, server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "def main"})[1]["tokens"]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(**fields, prompt="def main").choices[0]
    both = client.completions.create(**fields, prompt=["def main", "return"]).choices
    by_ids = client.completions.create(**fields, prompt=[ids, ids]).choices
    assert one.text == both[0].text == by_ids[0].text == by_ids[1].text and [c.index for c in both] == [0, 1]
    streamed = client.completions.create(**fields, prompt=["def main", "return"], stream=True)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in both]
    assert client.completions.create(model="tiny", prompt="def").usage.completion_tokens <= 16


def test_echo_gives_the_prompts_log_probabilities(client: Any, server: Server) -> None:
    """What evaluation harnesses do: the likelihood of a given text."""
    prompt = "def main():\n    return"
    ids = server.post("/tokenize", {"prompt": prompt})[1]["tokens"]
    asked = client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
    ).choices[0]
    silent = client.completions.create(model="tiny", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert silent.usage.completion_tokens == 0 and silent.usage.total_tokens == len(ids)
    alone = silent.choices[0]
    found = asked.logprobs
    assert asked.text.startswith(prompt) and len(found.tokens) == len(ids) + 1 == len(found.token_logprobs)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert alone.logprobs.token_logprobs == pytest.approx(found.token_logprobs[:-1], nan_ok=True, abs=1e-4)
    assert alone.finish_reason == "length" and found.text_offset == sorted(found.text_offset)
    both = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=0, max_tokens=2, n=2, seed=5)
    for choice in both.choices:
        assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(found.token_logprobs[1:-1], abs=1e-4)
        assert len(choice.logprobs.tokens) == len(ids) + 2 and choice.text.startswith(prompt)
    short = client.completions.create(model="tiny", prompt="def", logprobs=2, max_tokens=3, temperature=0).choices[0]
    pairs = zip(short.logprobs.token_logprobs, short.logprobs.top_logprobs, strict=True)
    assert all(value == pytest.approx(max(top.values()), abs=1e-4) for value, top in pairs)


def test_models_are_listed(client: Any) -> None:
    import openai

    (card,) = client.models.list().data
    assert card.id == "tiny" and card.max_model_len == CONTEXT and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4' on this server; use 'tiny'") as error:
        client.models.retrieve("gpt-4")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    "fields, param, said",
    [
        ({"messages": []}, "messages", "expected `array` of length >= 1"),
        ({"messages": "hello"}, "messages", "expected `array`, got `str`"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "reads text"),
        ({"temperature": -1}, "temperature", "expected `float` >= 0"),
        ({"temperature": "hot"}, "temperature", "expected `float | null`, got `str`"),
        ({"max_tokens": 0}, "max_tokens", "expected `int` >= 1"),
        ({"max_tokens": 5000}, "max_tokens", "ask for at most"),
        ({"n": 1.5}, "n", "got `float`"),
        ({"stop": ["a", 3]}, "stop[1]", "expected `str`, got `int`"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "add it"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid enum value 'xml'"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "leave it out"),
    ],
)
def test_what_is_wrong_is_said_as_openai_does(client: Any, fields: dict[str, Any], param: str, said: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    found = error.value.body
    assert said in found["message"] and found["param"] == param and found["type"] == "invalid_request_error"
    assert "; " in found["message"], "an error ends with the next step"


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(client: Any) -> None:
    import openai

    for prompt in ([5] * 3000, "def " * 3000, "x" * 200_000):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", prompt=prompt)
        assert error.value.code == "context_length_exceeded" and f"{CONTEXT:,}" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "def " * 3000}])
    assert error.value.code == "context_length_exceeded"


def test_ids_beyond_the_vocabulary_are_refused(client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model="tiny", prompt=[1, 99_999], max_tokens=2)


@pytest.mark.anyio
async def test_many_clients_at_once_get_what_they_would_get_alone(server: Server) -> None:
    import asyncio

    import openai

    prompts = [f"def main{i}" for i in range(40)]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:

        async def text(prompt: str, stream: bool) -> str:
            fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
            if not stream:
                return str((await client.completions.create(**fields)).choices[0].text)
            chunks = await client.completions.create(**fields, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        streamed = await asyncio.gather(*(text(prompt, True) for prompt in prompts))
        alone = [await text(prompt, False) for prompt in prompts[:5]]
        whole = await asyncio.gather(*(text(prompt, False) for prompt in prompts))
    assert streamed == whole and whole[:5] == alone


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
