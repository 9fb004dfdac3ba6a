"""Calls found in growing text, however it is cut into pieces."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.serving.openai.chat import ChatFormatter, _ChatChoice
from armillary.serving.openai.generation import ChoiceDelta
from armillary.serving.openai.schemas import ChatRequest, Function, Tool
from armillary.serving.openai.tool_calls import (
    ForcedCalls,
    ToolCallText,
    ToolStream,
    family_of,
    forced_schema,
    tool_stream,
)
from armillary.serving.openai.xml_calls import qwen_call

NAMES = ("weather", "news")
WEATHER = ToolCallText("weather", '{"town": "Köln"}')
NEWS = ToolCallText("news", "{}")
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'

QWEN = "<tool_call>\n<function=weather>\n<parameter=town>\nKöln\n</parameter>\n</function>\n</tool_call>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK = (
    f'<｜tool▁calls▁begin｜>{_CALL}function{_SEP}weather\n```json\n{{"town": "Köln"}}\n```{_END}\n'
    f"{_CALL}function{_SEP}news\n```json\n{{}}\n```{_END}<｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = f'<｜tool▁calls▁begin｜>{_CALL}weather{_SEP}{{"town": "Köln"}}{_END}<｜tool▁calls▁end｜>'

CASES = [
    ("hermes", "no call at all <tool", "no call at all <tool", []),
    ("hermes", TAGGED, "", [WEATHER]),
    ("hermes", f"Let me see. {TAGGED}\n{TAGGED} done", "Let me see. \n done", [WEATHER, WEATHER]),
    ("hermes", TAGGED.removesuffix("</tool_call>"), "", [WEATHER]),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
    ("hermes", "<tool_call>cut sho", "<tool_call>cut sho", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Köln"}}, {"name": "news"}]',
        "",
        [WEATHER, NEWS],
    ),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"town": "Köln"}[TOOL_CALLS]news{}', "", [WEATHER, NEWS]),
    ("mistral", "a list [1, 2] [TOOL", "a list [1, 2] [TOOL", []),
    ("mistral", "so [TOOL_CALLS] what", "so [TOOL_CALLS] what", []),
    ("llama3", '{"name": "weather", "parameters": {"town": "Köln"}}', "", [WEATHER]),
    (
        "llama3",
        '<|python_tag|>{"name": "weather", "parameters": {"town": "Köln"}}; {"name": "news"}',
        "",
        [WEATHER, NEWS],
    ),
    ("llama3", '  {"name": "weather", "parameters": "{\\"town\\": \\"Köln\\"}"}', "", [WEATHER]),
    ("qwen3_coder", f"see {QWEN}", "see ", [WEATHER]),
    ("qwen3_coder", QWEN.removesuffix("</tool_call>"), "", [WEATHER]),
    ("qwen3_coder", "<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
    ("deepseek", f"see {DEEPSEEK}", "see ", [WEATHER, NEWS]),
    ("deepseek", DEEPSEEK_31, "", [WEATHER]),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", 'So: {"name": "weather"}', 'So: {"name": "weather"}', []),
]


def read(stream: ToolStream, deltas: list[str]) -> tuple[str, list[ToolCallText]]:
    said, calls = "", list[ToolCallText]()
    for piece in deltas:
        text, found = stream.push(piece)
        said, calls = said + text, calls + found
    text, found = stream.finish()
    return said + text, calls + found


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
def test_a_call_is_found_whole_or_letter_by_letter(
    family: str, text: str, said: str, calls: list[ToolCallText]
) -> None:
    for deltas in ([text], list(text)):
        assert read(tool_stream(family, NAMES), deltas) == (said, calls)


@given(st.sampled_from(CASES), st.data())
def test_it_does_not_matter_how_the_text_is_cut(
    case: tuple[str, str, str, list[ToolCallText]], data: st.DataObject
) -> None:
    family, text, said, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_stream(family, NAMES), deltas) == (said, calls)


@given(st.sampled_from(["hermes", "mistral", "llama3"]), st.text(alphabet='<>/[]{}"tol_calTOLS|pyhn ;:,1', max_size=60))
def test_text_that_holds_no_call_is_never_lost(family: str, text: str) -> None:
    assert read(tool_stream(family, NAMES), list(text)) == (text, [])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|python_tag|>", "llama3"),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_family_is_read_off_the_template(template: str, family: str | None) -> None:
    assert family_of([template]) == family


def tool(name: str, **parameters: object) -> Tool:
    return Tool(type="function", function=Function(name=name, parameters=dict(parameters) or None))


def test_a_call_that_is_asked_for_has_a_schema() -> None:
    tools = [
        tool("weather", type="object", properties={"day": {"$ref": "#/$defs/day"}}, **{"$defs": {"day": {}}}),
        tool("news"),
    ]
    one = forced_schema(tools, "weather", single=False)
    assert one["properties"] == {"day": {"$ref": "#/$defs/day"}} and one["$defs"] == {"day": {}}
    some = forced_schema(tools, None, single=True)
    assert some["$defs"] == {"day": {}} and some["maxItems"] == 1 and some["minItems"] == 1
    names = [option["properties"]["name"]["const"] for option in some["items"]["anyOf"]]
    assert names == ["weather", "news"] and "$defs" not in json.dumps(some["items"]).replace("#/$defs", "")


def test_what_was_asked_for_becomes_calls() -> None:
    assert read(ForcedCalls("weather", NAMES), ['{"town": ', '"Köln"}']) == ("", [WEATHER])
    listed = '[{"name": "weather", "arguments": {"town": "Köln"}}, {"name": "news", "arguments": {}}]'
    assert read(ForcedCalls(None, NAMES), [listed]) == ("", [WEATHER, NEWS])
    assert read(ForcedCalls(None, NAMES), ['[{"name": "wea']) == ('[{"name": "wea', [])


@pytest.mark.parametrize(
    "named, engine, said",
    [(True, "stop", "stop"), (False, "stop", "tool_calls"), (True, "length", "length"), (False, "length", "length")],
)
def test_calls_that_were_cut_short_are_not_said_to_be_complete(named: bool, engine: str, said: str) -> None:
    text = '{"city": "Pa' if engine == "length" else '{"city": "Paris"}'
    text = text if named else f'[{{"name": "weather", "arguments": {text}' + ("}]" if engine == "stop" else "")
    choice = _ChatChoice(ForcedCalls("weather" if named else None, ["weather"]))
    texts: Any = SimpleNamespace(token_text=None)
    formatter = ChatFormatter([choice], ChatRequest(messages=[]), texts, by_name=named)
    (event,) = formatter.add(ChoiceDelta(choice=0, text=text, finish=engine))
    assert event["finish_reason"] == said and formatter.choices()[0]["finish_reason"] == said
    assert bool(choice.calls) == (named or engine == "stop")


def test_parameters_are_read_by_their_types() -> None:
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"}, "l": {"type": "array"}}
    values = {"n": "3", "s": "3", "b": "True", "l": '["a"]'}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    call = qwen_call(f"<function=f>{text}</function>", {"f": {"properties": properties}})
    assert call == {"name": "f", "arguments": {"n": 3, "s": "3", "b": True, "l": ["a"]}}
