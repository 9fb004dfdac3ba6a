"""From the fields of a checked body to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.engine.request.constraint import Structure
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput
from armillary.model.generation_config import SamplingDefaults
from armillary.serving.http.problem import Problem, bad
from armillary.serving.openai.schemas import Asked
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.tokenization import too_long
from armillary.spec.tables.serve import Serve

_SEEDS = 2**61
_NEUTRAL = SamplingDefaults()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted of every prompt of a body."""

    params: SamplingParams
    """for the engine, without stop texts"""
    stop: tuple[str, ...]
    """stop texts, which are looked for in the server"""
    include_stop: bool
    """they are part of the answer"""
    timeout_s: float | None
    """given up after so long"""
    own_time: bool
    """that is what the client itself asked for"""
    priority: int
    salt: str


def wish_of(
    body: Asked,
    *,
    max_tokens: int,
    most_s: float | None,
    structure: Structure | None,
    defaults: SamplingDefaults = _NEUTRAL,
    bad_tokens: tuple[tuple[int, ...], ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Wish:
    """Problem 400 where the fields cannot be had together."""
    top_p, top_k = _first(body.top_p, defaults.top_p), _first(body.top_k, defaults.top_k)
    stop, seed = body.stop, body.seed
    greedy = top_p == 0
    try:
        params = SamplingParams(
            n=body.n or 1,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            top_k=max(0, int(top_k or 0)),
            temperature=0.0 if greedy else _or(_first(body.temperature, defaults.temperature), 1.0),
            top_p=1.0 if greedy or top_p is None else top_p,
            min_p=_or(_first(body.min_p, defaults.min_p), 0.0),
            repetition_penalty=_or(_first(body.repetition_penalty, defaults.repetition_penalty), 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            logit_bias=_bias(body.logit_bias),
            seed=None if seed is None else seed % _SEEDS,
            stop_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
            bad_tokens=bad_tokens,
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        )
    except BadInput as error:
        raise bad(str(error), str(error).partition("=")[0] if "=" in str(error) else None) from None
    own_s = body.timeout_s
    times = [limit for limit in (own_s, most_s) if limit is not None]
    return Wish(
        params=params,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        timeout_s=min(times, default=None),
        include_stop=bool(body.include_stop_str_in_output),
        own_time=own_s is not None and own_s == min(times),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )


def refuse_priority(body: Asked, serve: Serve) -> None:
    """Problem 400 where a priority is asked for and would change nothing."""
    if body.priority and not serve.ageing_s:
        raise bad("priority is off here (serve.ageing_s=0); leave it out", "priority")


def late(wish: Wish, *, waited_s: float | None = None) -> Problem:
    """The time is over: 408 where it was the client's own, 504 where it was the server's, 503 where it was not the
    answer that took long: the request has not even begun after `waited_s`."""
    if waited_s is not None and (wish.timeout_s is None or waited_s < wish.timeout_s):
        return Problem(
            503,
            f"the request waited {waited_s:.0f} s without being started; try again later",
            code="timeout",
            retry_after_s=10,
        )
    if wish.own_time:
        return Problem(408, "the answer took longer than timeout_s; ask for less or give it more time", code="timeout")
    return Problem(504, f"the answer took longer than {wish.timeout_s:g} s; ask for less", code="timeout")


def _first(value: float | None, default: float | None) -> float | None:
    """What the request says, else the model."""
    return default if value is None else value


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (given or {}).items()}
    except ValueError:
        raise bad("logit_bias has a key that is no token id; use whole numbers", "logit_bias") from None


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
