"""How long an answer may get: what the request asks for, what the server allows, what the model's length leaves."""

from __future__ import annotations

from armillary.serving.http.problem import bad
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.tokenization import too_long


def truncated(prompt: list[int], asked: int | None, max_tokens: int | None, served: Served) -> list[int]:
    """The prompt's last `asked` tokens (truncate_prompt_tokens); -1: as many as leave room for the answer."""
    if asked is None:
        return prompt
    most = served.max_model_len - (max_tokens or 1) if asked == -1 else asked
    if asked == 0 or most < 1:
        raise bad(
            f"truncate_prompt_tokens={asked} leaves nothing of the prompt; ask for at least 1, or for fewer max_tokens",
            "truncate_prompt_tokens",
        )
    return prompt[-most:]


def answer_room(prompt_tokens: int, wanted: int | None, served: Served, param: str) -> int:
    """Tokens of the answer; Problem where the request cannot be met."""
    longest, most = served.max_model_len, served.serve.max_answer
    room = longest - prompt_tokens
    if room < 1:
        raise too_long(f"{prompt_tokens:,}", longest, param)
    if wanted is None:
        return min(limit for limit in (room, most, served.defaults.max_new_tokens) if limit is not None)
    if most is not None and wanted > most:
        raise bad(f"max_tokens={wanted:,} is more than this server's {most:,}; ask for less", "max_tokens")
    if wanted > room:
        raise bad(
            f"a prompt of {prompt_tokens:,} tokens and max_tokens={wanted:,} exceed the model's {longest:,}; ask "
            f"for at most {room:,}",
            "max_tokens",
            "context_length_exceeded",
        )
    return wanted
