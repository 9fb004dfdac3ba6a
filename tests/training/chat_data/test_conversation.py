"""Records in the forms people have them in become conversations; what is wrong is said with its place."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.errors import BadData
from armillary.training.chat_data.conversation import conversation

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "2 + 2?", "response": "4"},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"question": "2 + 2?", "answer": "4", "id": 7},
        {"messages": [ASKED | {"name": None}, SAID | {"tool_calls": None}], "prompt": None},
        {"messages": '[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]'},
    ],
    ids=lambda record: "+".join(record),
)
def test_many_forms_say_the_same(record: dict[str, Any]) -> None:
    found = conversation(record, "x.jsonl:1")
    assert found.messages == (ASKED, SAID) and found.answers == [1]


def test_an_instruction_comes_with_its_input_and_system() -> None:
    found = conversation({"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be short."}, "x:1")
    assert [each["content"] for each in found.messages] == ["Be short.", "Add.\n\n2, 2", "4"]
    assert found.messages[0]["role"] == "system"


def test_tools_and_template_variables_are_kept() -> None:
    record = {"messages": [ASKED, SAID], "tools": '[{"name": "add"}]', "chat_template_kwargs": {"thinking": True}}
    found = conversation(record, "x:1")
    assert found.tools == ({"name": "add"},) and found.extra == {"thinking": True}


def test_the_key_may_be_named() -> None:
    assert conversation({"turns": [ASKED, SAID]}, "x:1", key="turns").answers == [1]


def test_copies_are_known_by_what_they_say() -> None:
    first, second = (conversation({"messages": [ASKED, SAID], "id": i}, f"x:{i}") for i in range(2))
    assert first.identity == second.identity
    assert first.identity != conversation({"messages": [ASKED]}, "x:3").identity


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "hello"}, r"x:1 has neither messages nor a prompt and a response \(it has text\); name its list"),
        ({}, r"it has nothing"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": "hello"}, "a list is written as text that is not JSON"),
        ({"messages": ["hello"]}, "x:1: message 1 is not a table"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2 has no content"),
        ({"messages": [ASKED, SAID], "tools": {"a": 1}}, "tools must be a list"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData, match=message):
        conversation(record, "x:1")
