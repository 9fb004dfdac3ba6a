"""Checks of texts that another server makes: a classifier behind /predict, or a moderation model."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from armillary.fleet.gateway.upstream import ReplicaPool, UpstreamError
from armillary.fleet.guards.guard_config import GuardSettings
from armillary.fleet.guards.guard_verdict import TextCheck
from armillary.fleet.guards.ngrams import hashed_ngrams
from armillary.serving.http.problem import Problem

_MOST_BYTES = 1_000_000


class CheckFailed(Exception):
    """The server of a check does not answer, or not as expected."""


def remote_check(settings: GuardSettings) -> TextCheck:
    """The check of these settings; Problem 503 where its server fails and nothing may pass unchecked."""
    pool = ReplicaPool(settings.url, connect_timeout_s=settings.timeout_s)
    ask = _classified if settings.kind == "classifier" else _moderated

    async def check(text: str) -> str | None:
        try:
            async with asyncio.timeout(settings.timeout_s):
                return await ask(pool, settings, text)
        except (CheckFailed, UpstreamError, TimeoutError):
            if settings.on_failure == "allow":
                return None
            words = f"the {settings.title} check does not answer, and nothing passes unchecked; try again later"
            raise Problem(503, words, code="guard_unavailable", retry_after_s=2) from None

    return check


async def _classified(pool: ReplicaPool, settings: GuardSettings, text: str) -> str | None:
    answer = await _post(pool, "/predict", {"features": hashed_ngrams(text, settings.features)})
    scores = answer.get("prediction")
    scores = scores if isinstance(scores, list) else [scores]
    place = min(settings.label, len(scores) - 1)
    if not isinstance(scores[place], int | float):
        raise CheckFailed
    return f"score {scores[place]:.2f}" if scores[place] >= settings.threshold else None


async def _moderated(pool: ReplicaPool, settings: GuardSettings, text: str) -> str | None:
    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = await _post(pool, "/v1/chat/completions", body)
    try:
        said = str(answer["choices"][0]["message"]["content"]).strip().lower()
    except (KeyError, IndexError, TypeError):
        raise CheckFailed from None
    return " ".join(said.split())[:60] if said.startswith(settings.unsafe) else None


async def _post(pool: ReplicaPool, path: str, body: Any) -> dict[str, Any]:
    data = msgspec.json.encode(body)
    head = (
        f"POST {pool.base_path}{path} HTTP/1.1\r\nhost: {pool.authority.decode()}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    request, connection = head.encode() + data, await pool.connect()
    try:
        connection.send(request)
        try:
            status = await connection.head(60.0)
        except UpstreamError as error:
            if not error.reused:
                raise
            connection.abort()  # a kept connection that the server has just closed
            connection = await pool.connect_new()
            connection.send(request)
            status = await connection.head(60.0)
        parts, size = list[bytes](), 0
        while part := await connection.read(60.0):
            parts.append(part)
            size += len(part)
            if size > _MOST_BYTES:
                raise CheckFailed
    finally:
        connection.release()
    try:
        table = msgspec.json.decode(b"".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CheckFailed from None
    if status != 200 or not isinstance(table, dict):
        raise CheckFailed
    return table
