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
    "tools",
)
_TEXT_KEYS = ("content", "text", "arguments", "output", "thinking", "reasoning_content", "title", "description")
_ARGUMENTS = ("input", "arguments", "output")
"""keys of a call's arguments and result: where they are objects, all of their texts are the caller's own"""
Change = Callable[[str], Awaitable[str]]


async def guarded_prompt(table: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The fields of a request, with every text of its prompt as `change` returns it."""
    if _has_tokens(table.get("prompt")) or _has_tokens(table.get("input")):
        raise bad_request("prompts of this model are checked, which token ids cannot be; send text", "prompt")
    changed = {name: await _changed(table[name], change) for name in _FIELDS if name in table}
    return {**table, **changed}


def _has_tokens(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, int) or _has_tokens(item) for item in value)


async def _changed(value: Any, change: Change, *, own: bool = False) -> Any:
    """`own`: the texts under all keys are checked, not only those of the API."""
    if isinstance(value, str):
        return await change(value)
    if isinstance(value, list):
        return [await _changed(item, change, own=own) for item in value]
    if isinstance(value, dict):
        return {key: await _item(key, item, change, own) for key, item in value.items()}
    return value


async def _item(key: str, item: Any, change: Change, own: bool) -> Any:
    if isinstance(item, str) and not own and key not in _TEXT_KEYS:
        return item
    if isinstance(item, list) and not own and all(isinstance(each, str) for each in item) and key not in _TEXT_KEYS:
        return item  # names, as of required fields
    return await _changed(item, change, own=own or (key in _ARGUMENTS and isinstance(item, dict)))
