"""What has to be known before a test: the model's name, the form of request, extras taken, and how long a token is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import aiohttp

from armillary.errors import BadInput, NotFound
from armillary.serving.load.client import ask, clock_from, get_json, session
from armillary.serving.load.prompts import ByCharacters, ByTokenizer, Cut
from armillary.serving.load.record import Answer, Shot
from armillary.serving.load.target import Target, base_url
from armillary.spec.tables.load import Load

_SHORT, _SHORT_TOKENS, _LONG = "Hello.", 2, 2000
_TRIAL_TOKENS = 4
_USUAL_CHARS = 3.5
"""characters of a token where nobody counts: between prose and code of common vocabularies"""
_FORMS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A server that has answered."""

    target: Target
    """how requests look"""
    cut: Cut
    """makes text of a number of tokens"""
    overhead: int
    """tokens the chat template adds"""
    notes: tuple[str, ...]
    """what the reader of the report should know"""
    longest: int | None = None
    """tokens that it takes for prompt and answer together, where it says"""


def probe(url: str, load: Load, *, key: str = "") -> Probed:
    """Ask the server at `url` what it takes; NotFound where nobody answers, BadInput where no request works."""
    target = Target(base=base_url(url), model=load.model, key=key, temperature=load.temperature)
    return asyncio.run(_probe(target, load))


async def _probe(target: Target, load: Load) -> Probed:
    async with session(target, load.timeout_s) as http:
        if load.api == "predict" or (load.api == "auto" and await _is_predict(http, target)):
            return await _probe_predict(http, target)
        model, longest = (load.model, None) if load.model else await _first_model(http, target)
        target, short, notes = await _form(http, replace(target, model=model), load)
        cut, overhead, said = await _ruler(http, target, load, short)
    return Probed(target=target, cut=cut, overhead=overhead, notes=(*notes, *said), longest=longest)


async def _is_predict(http: aiohttp.ClientSession, target: Target) -> bool:
    """A server without /v1/models that has a /schema."""
    try:
        return (await get_json(http, f"{target.base}/v1/models"))[0] == 404 and (
            await get_json(http, f"{target.base}/schema")
        )[0] == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False  # whoever asks next says so


async def _probe_predict(http: aiohttp.ClientSession, target: Target) -> Probed:
    """A predict server: one row of made-up numbers that fits its schema."""
    try:
        status, schema = await get_json(http, f"{target.base}/schema")
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise NotFound(f"nobody answers at {target.base}; start a server, or give its address") from None
    if status != 200 or not isinstance(schema, dict):
        raise BadInput(f"{target.base}/schema says nothing (HTTP {status}); is it a predict server?")
    target = replace(target, api="predict", model=f"version {schema.get('version')}", sample=sample_of(schema))
    answer = await _try(http, target, "")
    if not answer.ok:
        raise BadInput(f"{target.url} refused a trial request: {answer.error}; its schema may be incomplete")
    notes = ("every request is the same row, and its whole answer is counted as one token",)
    return Probed(target=target, cut=ByCharacters(per_token=_USUAL_CHARS), overhead=0, notes=notes)


async def _first_model(http: aiohttp.ClientSession, target: Target) -> tuple[str, int | None]:
    """Its name, and how long a request it takes: vLLM, SGLang and ours say."""
    try:
        status, body = await get_json(http, f"{target.base}/v1/models")
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise NotFound(f"nobody answers at {target.base}; start a server, or give its address") from None
    if status in (401, 403):
        raise BadInput(f"{target.base} asks for an API key (HTTP {status}); give it with --key")
    rows = body.get("data") if isinstance(body, dict) else None
    if status != 200 or not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or "id" not in rows[0]:
        raise BadInput(f"{target.base}/v1/models lists no model (HTTP {status}); name it: --set load.model=NAME")
    longest = rows[0].get("max_model_len")
    return str(rows[0]["id"]), longest if isinstance(longest, int) else None


async def _form(http: aiohttp.ClientSession, target: Target, load: Load) -> tuple[Target, Answer, list[str]]:
    """The richest form of request that works: extras are left out one after another, then chat for completions."""
    forms = _FORMS if load.api == "auto" else (load.api,)
    first_error = ""
    for api in forms:
        for usage, exact in ((True, True), (True, False), (False, False)):
            tried = replace(target, api=api, usage=usage, exact=exact)  # type: ignore[arg-type]
            answer = await _try(http, tried, _SHORT)
            if answer.ok:
                return tried, answer, _form_notes(tried, answer)
            first_error = first_error or answer.error
            if not answer.error.startswith(("HTTP 400", "HTTP 422", "HTTP 404", "HTTP 405", "HTTP 501")):
                break  # nothing that another form would mend
    if first_error.startswith("connection"):
        raise NotFound(f"nobody answers at {target.base} ({first_error}); start a server, or give its address")
    raise BadInput(
        f"{target.url} refused a trial request: {first_error}; see `armillary load --help` for load.api and load.model"
    )


async def _try(http: aiohttp.ClientSession, target: Target, prompt: str) -> Answer:
    shot = Shot(index=0, at_s=None, body=target.body(prompt, _TRIAL_TOKENS))
    return await ask(http, target, shot, due_s=0.0, clock=clock_from(time.monotonic()))


def _form_notes(target: Target, answer: Answer) -> list[str]:
    notes = []
    if answer.counted_by == "chunks":
        notes.append(
            "the server gives no usage: a streamed piece is counted as a token, and prompts by their asked-for length"
        )
    if not target.exact:
        notes.append("the server does not take ignore_eos: answers may be shorter than asked for")
    return notes


async def _ruler(http: aiohttp.ClientSession, target: Target, load: Load, short: Answer) -> tuple[Cut, int, list[str]]:
    """(cut, overhead of the template, notes)."""
    if load.tokenizer:
        cut = ByTokenizer(folder=load.tokenizer)
        note = f"prompts are cut by the tokenizer of {load.tokenizer}"
        return cut, max(0, (short.tokens_in or 0) - _SHORT_TOKENS), [note]
    if short.tokens_in is None:
        return _guess()
    rates = []
    for size in (_LONG, _LONG // 4):  # the second where the context is short
        piece = ByCharacters(per_token=1.0)(size, Random(0))
        long = await _try(http, target, piece)
        if long.ok and long.tokens_in and long.tokens_in > short.tokens_in:
            rates.append((size - len(_SHORT)) / (long.tokens_in - short.tokens_in))
            break
    if not rates:
        return _guess()
    overhead = max(0, round(short.tokens_in - len(_SHORT) / rates[0]))
    note = f"prompts are cut at {rates[0]:.2f} characters a token, by the server's count of a trial prompt"
    return ByCharacters(per_token=rates[0]), overhead, [note]


def _guess() -> tuple[Cut, int, list[str]]:
    note = f"prompt lengths are a guess: {_USUAL_CHARS} characters a token"
    return ByCharacters(per_token=_USUAL_CHARS), 0, [note]


_FREE = 8


def sample_of(schema: dict[str, Any]) -> bytes:
    """The JSON of one row that fits; free sizes are 8."""
    dice = Random(0)
    fields = schema.get("inputs") or []
    rows = {field["name"]: _values(_shape(field, schema), field["dtype"], dice) for field in fields}
    body = {"features": next(iter(rows.values()))} if len(rows) == 1 else {"inputs": rows}
    return json.dumps(body).encode()


def _shape(field: dict[str, Any], schema: dict[str, Any]) -> list[int]:
    sizes = field["shape"] or [None, None]
    return [_FREE if size is None else size for size in (sizes[1:] if schema.get("batched") else sizes)]


def _values(shape: Sequence[int], dtype: str, dice: Random) -> Any:
    if shape:
        return [_values(shape[1:], dtype, dice) for _ in range(shape[0])]
    if "float" in dtype:
        return round(dice.gauss(0.0, 1.0), 4)
    return bool(dice.getrandbits(1)) if dtype == "bool" else dice.randrange(2)
