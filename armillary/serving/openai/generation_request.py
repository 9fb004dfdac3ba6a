"""From the fields of a validated body to the engine's sampling parameters and limits."""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.engine.request.constraint import Structure
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.request_checks import completion_limit
from armillary.errors import BadInput, ContextLengthExceeded
from armillary.model.generation_config import SamplingDefaults
from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.openai.pooling_request import PoolingFields
from armillary.serving.openai.schemas import SamplingFields
from armillary.serving.openai.served_model import ServedModel
from armillary.spec.tables.serve import Serve

_NUM_SEEDS = 2**61
_NEUTRAL = SamplingDefaults()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What a body asks of each of its prompts; the server looks for stop strings itself. `own_timeout` says that the
    client set the time limit."""

    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    timeout_s: float | None
    own_timeout: bool
    stream: bool
    skip_special: bool
    priority: int
    salt: str


def generation_request(
    body: SamplingFields,
    *,
    max_tokens: int,
    max_timeout_s: float | None,
    structure: Structure | None,
    defaults: SamplingDefaults = _NEUTRAL,
    bad_tokens: tuple[tuple[int, ...], ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> GenerationRequest:
    """Problem 400 where the fields contradict each other."""

    def field(value: float | None, default: float | None, neutral: float) -> float:
        """The request's value, else the model's default, else the neutral one."""
        return float(next((v for v in (value, default) if v is not None), neutral))

    top_p = field(body.top_p, defaults.top_p, 1.0)
    greedy = top_p == 0
    try:
        params = SamplingParams(
            n=body.n or 1,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            top_k=max(0, int(field(body.top_k, defaults.top_k, 0.0))),
            temperature=0.0 if greedy else field(body.temperature, defaults.temperature, 1.0),
            top_p=1.0 if greedy else top_p,
            min_p=field(body.min_p, defaults.min_p, 0.0),
            repetition_penalty=field(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=field(body.presence_penalty, None, 0.0),
            frequency_penalty=field(body.frequency_penalty, None, 0.0),
            logit_bias=_logit_bias(body.logit_bias),
            seed=None if body.seed is None else body.seed % _NUM_SEEDS,
            stop_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
            bad_tokens=bad_tokens,
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        )
    except BadInput as error:
        raise bad_request(str(error), str(error).partition("=")[0] if "=" in str(error) else None) from None
    timeout_s, own_timeout = time_limit(body.timeout_s, max_timeout_s)
    return GenerationRequest(
        params=params,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        timeout_s=timeout_s,
        include_stop=bool(body.include_stop_str_in_output),
        own_timeout=own_timeout,
        stream=bool(body.stream),
        skip_special=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )


def time_limit(own: float | None, most: float | None) -> tuple[float | None, bool]:
    """The time limit of a request, and whether it is the client's own."""
    limits = [limit for limit in (own, most) if limit is not None]
    return min(limits, default=None), own is not None and own == min(limits)


def refuse_priority(body: SamplingFields | PoolingFields, serve: Serve) -> None:
    """Problem 400 where the body sets a priority that the scheduler would ignore."""
    if body.priority and not serve.ageing_s:
        raise bad_request("priority is off on this server (serve.ageing_s=0); leave it out", "priority")


def timeout_problem(request: GenerationRequest, *, waited_s: float | None = None) -> Problem:
    """The request timed out: 408 where the client set the limit, 504 where the server did, 503 where the request had
    not started after `waited_s`."""
    if waited_s is not None and (request.timeout_s is None or waited_s < request.timeout_s):
        return Problem(
            503,
            f"the request waited {waited_s:.0f} s without being started; try again later",
            code="timeout",
            retry_after_s=10,
        )
    if request.own_timeout:
        return Problem(
            408, "the request took longer than timeout_s; ask for fewer tokens or a longer timeout", code="timeout"
        )
    return Problem(504, f"the request took longer than {request.timeout_s:g} s; ask for fewer tokens", code="timeout")


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (given or {}).items()}
    except ValueError:
        raise bad_request("logit_bias has a key that is no token id; use whole numbers", "logit_bias") from None


def truncate_prompt(prompt: list[int], limit: int | None, max_tokens: int | None, served: ServedModel) -> list[int]:
    """The prompt's last `limit` tokens (truncate_prompt_tokens); -1: as many as leave room for the completion."""
    if limit is None:
        return prompt
    most = served.max_model_len - (max_tokens or 1) if limit == -1 else limit
    if limit == 0 or most < 1:
        raise bad_request(
            f"truncate_prompt_tokens={limit} leaves nothing of the prompt; ask for at least 1, or for fewer max_tokens",
            "truncate_prompt_tokens",
        )
    return prompt[-most:]


def max_new_tokens(prompt_tokens: int, wanted: int | None, served: ServedModel, param: str) -> int:
    """Limit of the completion's tokens; Problem 400 where prompt and completion do not fit."""
    most = served.serve.max_answer
    if wanted is not None and most is not None and wanted > most:
        raise bad_request(f"max_tokens={wanted:,} is more than this server's {most:,}; ask for less", "max_tokens")
    try:
        limit = completion_limit(prompt_tokens, wanted, served.max_model_len)
    except ContextLengthExceeded as error:
        too_long = prompt_tokens >= served.max_model_len
        raise bad_request(str(error), param if too_long else "max_tokens", error.code) from None
    if wanted is not None:
        return limit
    return min(number for number in (limit, most, served.defaults.max_new_tokens) if number is not None)
