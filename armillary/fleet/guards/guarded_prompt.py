"""Guards on a request: every text of a prompt is checked, and masked or refused, before a replica sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from armillary.serving.http.problem import bad_request

_FIELDS = (
    "instructions",
    "system",
    "messages",
    "prompt",
    "suffix",
    "input",
    "query",
    "documents",
    "text_1",
    "text_2",
    "instruction",
)
_TEXT_KEYS = ("content", "text", "arguments", "output", "thinking", "reasoning_content", "title")
Change = Callable[[str], Awaitable[str]]


async def guarded_prompt(table: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The fields of a request, with every text of its prompt as `change` returns it."""
    if _has_tokens(table.get("prompt")) or _has_tokens(table.get("input")):
        raise bad_request("prompts of this model are checked, which token ids cannot be; send text", "prompt")
    changed = {name: await _changed(table[name], change) for name in _FIELDS if name in table}
    return {**table, **changed}


def _has_tokens(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, int) or _has_tokens(item) for item in value)


async def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return await change(value)
    if isinstance(value, list):
        return [await _changed(item, change) for item in value]
    if isinstance(value, dict):
        return {
            key: await _changed(item, change) if key in _TEXT_KEYS or isinstance(item, list | dict) else item
            for key, item in value.items()
        }
    return value
