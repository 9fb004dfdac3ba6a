"""One request to the server, with the time of everything that comes back.

A time is taken when bytes arrive, before anything is made of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from armillary.serving.load.record import Answer, Shot
from armillary.serving.load.stream_events import EventStream, Pieces, error_text
from armillary.serving.load.target import Target

Clock = Callable[[], float]
_ERROR_BYTES = 4096


def session(target: Target, timeout_s: float) -> aiohttp.ClientSession:
    """Connections without a limit, kept open between requests; proxies of the environment are not asked."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
        read_bufsize=2**18,
    )


async def ask(http: aiohttp.ClientSession, target: Target, shot: Shot, *, due_s: float, clock: Clock) -> Answer:
    """Send one request and follow its answer to the end; whatever goes wrong is the answer's error."""
    pieces = Pieces()
    sent = clock()
    try:
        await _follow(http, target, shot.body, pieces, clock)
    except TimeoutError:
        pieces.error = "timed out"
    except (aiohttp.ClientError, OSError) as error:
        pieces.error = f"connection: {_reason(error)}"
    return _answer(shot, pieces, due_s=due_s, sent_s=sent, end_s=clock())


async def _follow(http: aiohttp.ClientSession, target: Target, body: bytes, pieces: Pieces, clock: Clock) -> None:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    async with http.post(target.url, data=body, headers=headers) as response:
        if response.status != 200:
            pieces.error = f"HTTP {response.status}: {_said(await response.content.read(_ERROR_BYTES))}"
            return
        if "event-stream" not in response.content_type:
            data = await response.read()
            pieces.whole(data, clock())
            return
        events = EventStream()
        async for some in response.content.iter_any():
            now = clock()
            for data in events.feed(some):
                pieces.add(data, now)
        for data in events.close():
            pieces.add(data, clock())
    if not pieces.finished and not pieces.error:
        pieces.error = "the stream ended before the answer did"


def _answer(shot: Shot, pieces: Pieces, *, due_s: float, sent_s: float, end_s: float) -> Answer:
    counted = pieces.tokens_out is not None
    return Answer(
        index=shot.index,
        due_s=due_s,
        sent_s=sent_s,
        end_s=end_s,
        stamps_s=tuple(pieces.stamps),
        tokens_in=pieces.tokens_in,
        tokens_out=pieces.tokens_out if counted else len(pieces.stamps),  # type: ignore[arg-type]
        counted_by="usage" if counted else "chunks",
        error=pieces.error,
    )


def _said(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except ValueError:
        return error_text(body.decode("utf-8", "replace")) or "no reason given"


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return " ".join(text.split())[:160]


async def get_json(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """(status, body) of a GET; the body is None where it is not JSON."""
    async with http.get(url) as response:
        try:
            return response.status, json.loads(await response.read())
        except ValueError:
            return response.status, None


def clock_from(begin: float) -> Clock:
    """Seconds since `begin` of time.monotonic, which all processes of a machine share."""
    return lambda: time.monotonic() - begin
