"""Log-probabilities in the forms of OpenAI's two endpoints."""

from collections.abc import Callable
from typing import Any

TokenText = Callable[[int], tuple[str, tuple[int, ...]]]
"""token id -> its text and bytes"""
_MIN_LOGPROB = -9999.0
"""JSON has no number for minus infinity"""


def chat_entry(logprob: tuple[Any, ...], token_text: TokenText) -> dict[str, Any]:
    """One token of a chat completion."""
    token, value, top = logprob
    return _chat_token(token, value, token_text) | {"top_logprobs": [_chat_token(t, v, token_text) for t, v in top]}


def _chat_token(token: int, value: float, token_text: TokenText) -> dict[str, Any]:
    text, raw = token_text(token)
    return {"token": text, "logprob": max(_MIN_LOGPROB, value), "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of /v1/completions."""

    def __init__(self, token_text: TokenText, *, as_ids: bool = False) -> None:
        self._shown_text = (lambda token: (f"token_id:{token}", ())) if as_ids else token_text
        self._token_text = token_text
        self._offset = 0

    def part(self, logprobs: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The lists of some more tokens; a token without a log-probability has None."""
        offsets, tokens = [], []
        for token, _, _ in logprobs:
            offsets.append(self._offset)
            tokens.append(self._shown_text(token)[0])
            self._offset += len(self._token_text(token)[0])
        return {
            "tokens": tokens,
            "text_offset": offsets,
            "token_logprobs": [None if value is None else max(_MIN_LOGPROB, value) for _, value, _ in logprobs],
            "top_logprobs": [None if top is None else self._top(top) for _, _, top in logprobs],
        }

    def _top(self, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """Text -> log-probability; of tokens with the same text the likeliest counts."""
        table: dict[str, float] = {}
        for token, value in top:
            table.setdefault(self._shown_text(token)[0], max(_MIN_LOGPROB, value))
        return table
