"""One request to the server, with the arrival time of each event of its streamed response.

A time stamp is taken when bytes arrive, before they are parsed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from armillary.errors import NotFound
from armillary.serving.load.record import PreparedRequest, RequestResult
from armillary.serving.load.target import Target

Clock = Callable[[], float]
_ERROR_BYTES = 4096
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass
class StreamedResponse:
    """A response while it arrives: the times of the chunks with text, and the lengths by the server's count."""

    stamps: list[float] = field(default_factory=list)
    tokens_in: int | None = None
    tokens_out: int | None = None
    finished: bool = False
    error: str = ""

    def add(self, data: bytes, now: float) -> None:
        """Add one event that arrived at `now`."""
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = f"an event that is not JSON: {data[:80]!r}"
            return
        if not isinstance(event, dict):
            self.error = f"an event that is not an object: {data[:80]!r}"
            return
        if event.get("error"):
            self.error = error_text(event)
        self._count(event.get("usage"))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self.stamps += [now] if _has_text(choice) else []
                self.finished = self.finished or bool(choice.get("finish_reason"))

    def add_complete(self, data: bytes, now: float) -> None:
        """Add a response that was not streamed, which arrived at `now`."""
        self.add(data, now)
        if not self.error:
            self.stamps, self.finished = [now], True

    def _count(self, usage: Any) -> None:
        table = usage if isinstance(usage, dict) else {}
        tokens_in, tokens_out = table.get("prompt_tokens"), table.get("completion_tokens")
        self.tokens_in = tokens_in if isinstance(tokens_in, int) else self.tokens_in
        self.tokens_out = tokens_out if isinstance(tokens_out, int) else self.tokens_out


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice has text, rather than a role or an end only."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text")) or any(delta.get(key) for key in _TEXT_KEYS)


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's form, or the body itself."""
    inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(message).split())[:200]


class EventStream:
    """Parser of server-sent events (WHATWG HTML, section 9.2); aiohttp has none."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """Data of a last event without its blank line."""
        events = self.feed(b"\n\n") if self._rest or self._data else []
        self._rest = b""
        return events


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
    response, sent_s = StreamedResponse(), clock()
    try:
        await _read_response(http, target, request.body, response, clock)
    except TimeoutError:
        response.error = "timed out"
    except (aiohttp.ClientError, OSError) as error:
        reason = " ".join((str(error) or type(error).__name__).split())
        response.error = f"connection: {reason[:160]}"
    return RequestResult(
        index=request.index,
        due_s=due_s,
        sent_s=sent_s,
        end_s=clock(),
        stamps_s=tuple(response.stamps),
        tokens_in=response.tokens_in,
        tokens_out=len(response.stamps) if response.tokens_out is None else response.tokens_out,
        counted_by="chunks" if response.tokens_out is None else "usage",
        error=response.error,
    )


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


def _error_message(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except ValueError:
        return error_text(body.decode("utf-8", "replace")) or "no reason given"


async def get_json(http: aiohttp.ClientSession, target: Target, path: str) -> tuple[int, Any]:
    """(status, body) of a GET; the body is None where it is not JSON. NotFound where no server responds."""
    try:
        async with http.get(target.base + path) as response:
            return response.status, json.loads(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError):
        raise NotFound(f"no server responds at {target.base}; start one, or give its address") from None
    except ValueError:
        return response.status, None


def clock_from(begin: float) -> Clock:
    """A clock of seconds since `begin` on time.monotonic, which all processes of a machine share."""
    return lambda: time.monotonic() - begin
