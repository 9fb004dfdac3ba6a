"""One request to the server, with the arrival time of each event of its response.

A time stamp is taken when bytes arrive, before they are parsed.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from armillary.serving.load.record import PreparedRequest, RequestResult
from armillary.serving.load.stream_events import EventStream, StreamedResponse, error_text
from armillary.serving.load.target import Target

Clock = Callable[[], float]
_ERROR_BYTES = 4096


def session(target: Target, timeout_s: float) -> aiohttp.ClientSession:
    """A client session without a limit of connections, which stay open between requests, and without proxies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        headers=target.headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
        read_bufsize=2**18,
    )


async def send_request(
    http: aiohttp.ClientSession, target: Target, request: PreparedRequest, *, due_s: float, clock: Clock
) -> RequestResult:
    """Send one request and read its response to the end; any failure is the result's error."""
    response = StreamedResponse()
    sent = clock()
    try:
        await _read_response(http, target, request.body, response, clock)
    except TimeoutError:
        response.error = "timed out"
    except (aiohttp.ClientError, OSError) as error:
        response.error = f"connection: {_reason(error)}"
    return _result(request, response, due_s=due_s, sent_s=sent, end_s=clock())


async def _read_response(
    http: aiohttp.ClientSession, target: Target, body: bytes, streamed: StreamedResponse, clock: Clock
) -> None:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    async with http.post(target.url, data=body, headers=headers) as response:
        if response.status != 200:
            streamed.error = f"HTTP {response.status}: {_error_message(await response.content.read(_ERROR_BYTES))}"
            return
        if "event-stream" not in response.content_type:
            data = await response.read()
            streamed.add_complete(data, clock())
            return
        events = EventStream()
        async for chunk in response.content.iter_any():
            now = clock()
            for data in events.feed(chunk):
                streamed.add(data, now)
        for data in events.close():
            streamed.add(data, clock())
    if not streamed.finished and not streamed.error:
        streamed.error = "the stream ended before the response was complete"


def _result(
    request: PreparedRequest, streamed: StreamedResponse, *, due_s: float, sent_s: float, end_s: float
) -> RequestResult:
    counted = streamed.tokens_out is not None
    return RequestResult(
        index=request.index,
        due_s=due_s,
        sent_s=sent_s,
        end_s=end_s,
        stamps_s=tuple(streamed.stamps),
        tokens_in=streamed.tokens_in,
        tokens_out=streamed.tokens_out if counted else len(streamed.stamps),  # type: ignore[arg-type]
        counted_by="usage" if counted else "chunks",
        error=streamed.error,
    )


def _error_message(body: bytes) -> str:
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
    """A clock of seconds since `begin` on time.monotonic, which all processes of a machine share."""
    return lambda: time.monotonic() - begin
