"""Log-probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TokenText = Callable[[int], tuple[str, tuple[int, ...]]]
_LEAST = -9999.0
"""minus infinity, which JSON has no number for"""


def _number(value: float) -> float:
    return max(_LEAST, value)


def chat_entry(logprob: tuple[Any, ...], text_of: TokenText) -> dict[str, Any]:
    """One token of a chat's answer."""
    token, value, likeliest = logprob
    return _chat_token(token, value, text_of) | {"top_logprobs": [_chat_token(t, v, text_of) for t, v in likeliest]}


def _chat_token(token: int, value: float, text_of: TokenText) -> dict[str, Any]:
    text, raw = text_of(token)
    return {"token": text, "logprob": _number(value), "bytes": list(raw)}


class CompletionLogprobs:
    """Four lists that grow together, as /v1/completions gives them."""

    def __init__(self, text_of: TokenText, *, as_ids: bool = False) -> None:
        self._text_of = (lambda token: (f"token_id:{token}", ())) if as_ids else text_of
        self._plain = text_of
        self._offset = 0

    def part(self, logprobs: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Of some more tokens; one that follows nothing has the value None."""
        offsets, tokens = [], []
        for token, _, _ in logprobs:
            offsets.append(self._offset)
            tokens.append(self._text_of(token)[0])
            self._offset += len(self._plain(token)[0])
        return {
            "tokens": tokens,
            "text_offset": offsets,
            "token_logprobs": [None if value is None else _number(value) for _, value, _ in logprobs],
            "top_logprobs": [None if top is None else self._top(top) for _, _, top in logprobs],
        }

    def _top(self, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """Different tokens may have the same text: the likelier counts."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._text_of(token)[0], _number(value))
        return found
