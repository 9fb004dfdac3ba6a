"""Probes a server before a test: the model's name, the API, supported extras, and characters per token."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import aiohttp

from armillary.errors import BadInput, NotFound
from armillary.serving.load.client import clock_from, get_json, send_request, session
from armillary.serving.load.prompts import ByCharacters, ByTokenizer, PromptCutter
from armillary.serving.load.record import PreparedRequest, RequestResult
from armillary.serving.load.target import Target, base_url
from armillary.spec.tables.traffic import Load

_SHORT, _SHORT_TOKENS, _LONG_CHARS = "Hello.", 2, 2000
_PROBE_TOKENS = 4
_DEFAULT_CHARS = 3.5
"""characters per token where the server does not count: between prose and code of common vocabularies"""
_APIS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class ProbedServer:
    """A server that was probed: the form of its requests, and how prompts of a length are cut for it. `overhead` is the
    number of tokens that its chat template adds."""

    target: Target
    cut: PromptCutter
    overhead: int
    notes: tuple[str, ...]
    max_model_len: int | None = None


def probe(url: str, load: Load, *, key: str = "") -> ProbedServer:
    """Probe the server at `url`; NotFound where it does not respond, BadInput where no request works."""
    target = Target(base=base_url(url), model=load.model, key=key, temperature=load.temperature)
    return asyncio.run(_probe(target, load))


async def _probe(target: Target, load: Load) -> ProbedServer:
    async with session(target, load.timeout_s) as http:
        if load.api == "predict" or (load.api == "auto" and await _is_predict(http, target)):
            return await _probe_predict(http, target)
        model, max_model_len = (load.model, None) if load.model else await _first_model(http, target)
        target, short, notes = await _choose_api(http, replace(target, model=model), load)
        cut, overhead, note = await _prompt_cutter(http, target, load, short)
    return ProbedServer(target=target, cut=cut, overhead=overhead, notes=(*notes, note), max_model_len=max_model_len)


async def _is_predict(http: aiohttp.ClientSession, target: Target) -> bool:
    """Whether the server has /schema and no /v1/models."""
    try:
        status, _ = await get_json(http, target, "/v1/models")
        return status == 404 and (await get_json(http, target, "/schema"))[0] == 200
    except NotFound:
        return False  # the next request reports it


async def _probe_predict(http: aiohttp.ClientSession, target: Target) -> ProbedServer:
    """Probe a predict server with one row of random numbers that fits its schema."""
    status, schema = await get_json(http, target, "/schema")
    if status != 200 or not isinstance(schema, dict):
        raise BadInput(f"{target.base}/schema has no schema (HTTP {status}); is it a predict server?")
    target = replace(target, api="predict", model=f"version {schema.get('version')}", sample=sample_of(schema))
    result = await _try(http, target, "")
    if not result.ok:
        raise BadInput(f"{target.url} refused a test request: {result.error}; its schema may be incomplete")
    return ProbedServer(
        target=target,
        cut=ByCharacters(per_token=_DEFAULT_CHARS),
        overhead=0,
        notes=("every request is the same row, and its response counts as one token",),
    )


async def _first_model(http: aiohttp.ClientSession, target: Target) -> tuple[str, int | None]:
    """The model's name and max_model_len, which vLLM, SGLang and our server report."""
    status, body = await get_json(http, target, "/v1/models")
    if status in (401, 403):
        raise BadInput(f"{target.base} requires an API key (HTTP {status}); give it with --key")
    rows = body.get("data") if isinstance(body, dict) else None
    if status != 200 or not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or "id" not in rows[0]:
        raise BadInput(f"{target.base}/v1/models lists no model (HTTP {status}); name it: --set load.model=NAME")
    max_model_len = rows[0].get("max_model_len")
    return str(rows[0]["id"]), max_model_len if isinstance(max_model_len, int) else None


async def _choose_api(
    http: aiohttp.ClientSession, target: Target, load: Load
) -> tuple[Target, RequestResult, list[str]]:
    """The first form of request that works: with all extras, with fewer, then completions instead of chat."""
    apis = _APIS if load.api == "auto" else (load.api,)
    first_error = ""
    for api in apis:
        for usage, exact in ((True, True), (True, False), (False, False)):
            tried = replace(target, api=api, usage=usage, exact=exact)  # type: ignore[arg-type]
            result = await _try(http, tried, _SHORT)
            if result.ok:
                return tried, result, _api_notes(tried, result)
            first_error = first_error or result.error
            if not result.error.startswith(("HTTP 400", "HTTP 422", "HTTP 404", "HTTP 405", "HTTP 501")):
                break  # another form of request would fail too
    if first_error.startswith("connection"):
        raise NotFound(f"no server responds at {target.base} ({first_error}); start one, or give its address")
    raise BadInput(
        f"{target.url} refused a test request: {first_error}; see `armillary load --help` for load.api and load.model"
    )


async def _try(http: aiohttp.ClientSession, target: Target, prompt: str) -> RequestResult:
    request = PreparedRequest(index=0, at_s=None, body=target.body(prompt, _PROBE_TOKENS))
    return await send_request(http, target, request, due_s=0.0, clock=clock_from(time.monotonic()))


def _api_notes(target: Target, result: RequestResult) -> list[str]:
    notes = []
    if result.counted_by == "chunks":
        notes.append(
            "the server reports no usage: a streamed chunk counts as a token, a prompt by its requested length"
        )
    if not target.exact:
        notes.append("the server does not support ignore_eos: completions may be shorter than requested")
    return notes


async def _prompt_cutter(
    http: aiohttp.ClientSession, target: Target, load: Load, short: RequestResult
) -> tuple[PromptCutter, int, str]:
    """(cutter, overhead of the template, note)."""
    if load.tokenizer:
        overhead = max(0, (short.tokens_in or 0) - _SHORT_TOKENS)
        return ByTokenizer(folder=load.tokenizer), overhead, f"prompts are cut by the tokenizer of {load.tokenizer}"
    note = f"prompt lengths are estimated: {_DEFAULT_CHARS} characters per token"
    estimate = ByCharacters(per_token=_DEFAULT_CHARS), 0, note
    if short.tokens_in is None:
        return estimate
    for size in (_LONG_CHARS, _LONG_CHARS // 4):  # the second for a short context
        long = await _try(http, target, ByCharacters(per_token=1.0)(size, Random(0)))
        if long.ok and long.tokens_in and long.tokens_in > short.tokens_in:
            per_token = (size - len(_SHORT)) / (long.tokens_in - short.tokens_in)
            overhead = max(0, round(short.tokens_in - len(_SHORT) / per_token))
            note = f"prompts are cut at {per_token:.2f} characters per token, by the server's count of a test prompt"
            return ByCharacters(per_token=per_token), overhead, note
    return estimate


_FREE_SIZE = 8


def sample_of(schema: dict[str, Any]) -> bytes:
    """The JSON of one random row that fits the schema; free sizes are 8."""
    rng = Random(0)
    fields = schema.get("inputs") or []
    rows = {field["name"]: _values(_shape(field, schema), field["dtype"], rng) for field in fields}
    return json.dumps({"features": next(iter(rows.values()))} if len(rows) == 1 else {"inputs": rows}).encode()


def _shape(field: dict[str, Any], schema: dict[str, Any]) -> list[int]:
    sizes = field["shape"] or [None, None]
    return [_FREE_SIZE if size is None else size for size in (sizes[1:] if schema.get("batched") else sizes)]


def _values(shape: Sequence[int], dtype: str, rng: Random) -> Any:
    if shape:
        return [_values(shape[1:], dtype, rng) for _ in range(shape[0])]
    if "float" in dtype:
        return round(rng.gauss(0.0, 1.0), 4)
    return bool(rng.getrandbits(1)) if dtype == "bool" else rng.randrange(2)
