"""The chat box of the tab Serve: one conversation passed on to a server on this machine, its answer streamed back."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.problem import Problem
from armillary.web.tabs.server_tab import is_loopback

MAX_TOKENS = 512
TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=5)


async def chat(connection: AsgiConnection, body: bytes) -> None:
    """Pass {url, key, messages} on to /v1/chat/completions of the server at `url`; answer with its events."""
    try:
        asked = json.loads(body)
        url, key, messages = str(asked["url"]), str(asked.get("key", "")), asked["messages"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Problem(400, "a chat is JSON with url and messages; use the box of the page") from None
    if not is_loopback(url):
        raise Problem(400, f"{url} is not on this machine; give an address like http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as http:
            await _stream(connection, http, base, messages)
    except (aiohttp.ClientError, OSError) as error:
        raise Problem(502, f"no answer from {url} ({error}); is the server running?") from None


async def _stream(connection: AsgiConnection, http: aiohttp.ClientSession, base: str, messages: Any) -> None:
    wanted = {"model": await _model(http, base), "messages": messages, "stream": True, "max_tokens": MAX_TOKENS}
    async with http.post(f"{base}/v1/chat/completions", json=wanted, allow_redirects=False) as answer:
        if answer.status != 200:
            raise Problem(502, _message(await answer.read(), answer.status))
        await connection.begin_events()
        async for part in answer.content.iter_any():
            await connection.event(part)
    await connection.end_events()


async def _model(http: aiohttp.ClientSession, base: str) -> str:
    """The first model that the server names."""
    async with http.get(f"{base}/v1/models", allow_redirects=False) as answer:
        body = await answer.read()
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise Problem(502, f"{base} names no model: {_message(body, answer.status)}") from None


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}; look at its log"
