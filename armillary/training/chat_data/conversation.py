"""Conversations out of records: chat messages, ShareGPT turns, or a prompt with its response.

The keys of a record show which form it has; an error names its file and line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from armillary.errors import BadData
from armillary.model.text.train_tokenizer import CHAT_TEMPLATE

_LISTS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "input")
_RESPONSES = ("response", "completion", "output", "answer")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""names that ShareGPT files use"""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order (role and content at least; weight 0 on an assistant's message keeps it out of the loss) and
    the other inputs of the chat template: functions the assistant may call, and further variables. `origin` is file
    and line."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def identity(self) -> str:
        """The same text for the same conversation: copies land in the same split."""
        return json.dumps([self.messages, self.tools, dict(self.extra)], sort_keys=True, ensure_ascii=False)

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages to learn."""
        return [i for i, each in enumerate(self.messages) if each["role"] == "assistant" and each.get("weight", 1)]


def conversation(record: Mapping[str, Any], origin: str, *, key: str = "") -> Conversation:
    """What a record says; `key` names its list of messages where that is not called messages."""
    record = {name: value for name, value in record.items() if value is not None}
    messages = _messages(record, origin, key)
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": record["system"]}, *messages]
    tools = _decoded(record.get("tools"), origin)
    extra = _decoded(record.get("chat_template_kwargs"), origin) or {}
    if not isinstance(extra, Mapping) or not isinstance(tools, list | None):
        raise BadData(f"{origin}: tools must be a list and chat_template_kwargs a table; mend the record")
    return Conversation(messages=tuple(messages), tools=tuple(tools) if tools else None, extra=extra, origin=origin)


def _messages(record: Mapping[str, Any], origin: str, key: str) -> list[dict[str, Any]]:
    for name in (key, *_LISTS):
        if name and name in record:
            return _turns(_decoded(record[name], origin), origin, name)
    prompt = next((name for name in _PROMPTS if name in record), None)
    response = next((name for name in _RESPONSES if name in record), None)
    if prompt is None or response is None:
        keys = ", ".join(map(str, record)) or "nothing"
        problem = f"{origin} has neither messages nor a prompt and a response (it has {keys})"
        raise BadData(f"{problem}; name its list of messages with --set data.key=NAME")
    asked = _side(record[prompt], "user", origin, prompt)
    if prompt == "instruction" and isinstance(record.get("input"), str) and record["input"].strip():
        asked[-1]["content"] += "\n\n" + record["input"]
    return asked + _side(record[response], "assistant", origin, response)


def _side(value: Any, role: str, origin: str, name: str) -> list[dict[str, Any]]:
    """A prompt or response: text, or messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns(value, origin, name)


def _turns(value: Any, origin: str, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadData(f"{origin}: '{name}' is not a list of messages; each is a table with role and content")
    return [_message(each, f"{origin}: message {number}") for number, each in enumerate(value, start=1)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadData(f"{where} is not a table; write it as role and content")
    fields = {name: item for name, item in value.items() if item is not None}  # Parquet fills lacking keys with null
    role = fields.pop("role", None) or fields.pop("from", None)
    if not isinstance(role, str):
        raise BadData(f"{where} has no role; add role = user or assistant")
    if "content" not in fields and "value" in fields:
        fields["content"] = fields.pop("value")
    if "content" not in fields and "tool_calls" not in fields:
        raise BadData(f"{where} has no content; add it, or leave the message out")
    return {"role": _ROLES.get(role, role), "content": ""} | fields


def _decoded(value: Any, origin: str) -> Any:
    """Lists and tables that a file holds as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise BadData(f"{origin}: a list is written as text that is not JSON ({error}); mend the record") from None


PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- 'Assistant:' }}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""
"""The space before an answer belongs to it: a word and the space before it are usually one token."""

TEMPLATES = {"chatml": CHAT_TEMPLATE, "plain": PLAIN}
"""values of data.template besides files"""
