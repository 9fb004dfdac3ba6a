"""Replicas that do as they are told, and a gateway in front of them, all in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armillary.fleet.gateway.gateway_app import Gateway
from armillary.fleet.gateway.gateway_config import GatewayConfig
from armillary.fleet.gateway.health import HealthChecker
from armillary.fleet.gateway.keys import KeyFile, KeyRing
from armillary.fleet.gateway.limits import Limiter, LocalLimiter
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.run_gateway import make_gateway
from armillary.fleet.gateway.slow_replicas import SlowReplicas
from armillary.fleet.gateway.upstream import sweep
from armillary.serving.http.json_log import JsonLog
from armillary.spec.toml.fields import build

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"tok"}}]}\n\n'


@dataclass
class FakeReplica:
    """What it does, and what it saw."""

    status: int = 200
    tokens: int = 3
    texts: list[str] | None = None  # instead of "tok" for each token
    prediction: list[float] | None = None  # of a classifier
    completion_tokens: int | None = None  # in its usage; none: as many as it sends
    hangs: bool = False  # accepts requests and says nothing
    hangs_after: int | None = None  # so many tokens of a stream
    dies_after: int | None = None  # closes the connection after so many
    error_after: int | None = None  # ends its stream with an event that says so
    dies_in_body: bool = False  # closes the connection in the middle of a complete response
    has_ready: bool = True
    silent_checks: bool = False  # does not answer GET
    gap_s: float = 0.0
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    disconnected: int = 0  # clients that left in the middle
    server: asyncio.Server | None = None
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.connections.values():
            writer.transport.abort()
        await asyncio.gather(*self.connections, return_exceptions=True)
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        try:
            await self._requests(reader, writer)
        finally:
            del self.connections[task]
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[16:]) for line in head.split("\r\n") if line.startswith("content-length: ")), 0)
                body = await reader.readexactly(length)
                if self.hangs:
                    await reader.read()
                    self.disconnected += 1
                    break
                if head.startswith("GET") and self.silent_checks:
                    await reader.read()
                    break
                if head.startswith("GET"):
                    writer.write(_response(200 if self.has_ready or "/v1/models" in head else 404, {}))
                elif not await self._complete(head, json.loads(body), reader, writer):
                    break

    async def _complete(self, head: str, body: dict[str, Any], reader: Any, writer: asyncio.StreamWriter) -> bool:
        self.heads.append(head)
        self.bodies.append(body)
        texts = self.texts if self.texts is not None else ["tok"] * self.tokens
        used = len(texts) if self.completion_tokens is None else self.completion_tokens
        usage = {"prompt_tokens": 5, "completion_tokens": used}
        if self.status != 200 or not body.get("stream"):
            if self.dies_in_body:
                writer.write(_response(200, {"choices": ["x" * 100]})[:-50])
                await writer.drain()
                return False
            message = {"content": "".join(texts)}
            answer = {"choices": [{"text": "".join(texts), "message": message}], "usage": usage}
            writer.write(_response(self.status, answer | ({"prediction": self.prediction} if self.prediction else {})))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, text in enumerate(texts):
            if number == self.dies_after:
                return False
            if number == self.error_after:
                writer.write(_chunk('data: {"error":{"message":"the engine died"}}\n\n') + b"0\r\n\r\n")
                return True
            if number == self.hangs_after:
                await reader.read()
                self.disconnected += 1
                return False
            writer.write(_chunk(CHUNK.replace("tok", text)))
            await writer.drain()
            await asyncio.sleep(self.gap_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            writer.write(_chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"))
        if self.texts is not None:
            writer.write(_chunk('data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'))
        writer.write(_chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
        return True


def _chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def _response(status: int, table: dict[str, Any]) -> bytes:
    body = json.dumps(table).encode()
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


@dataclass
class Answer:
    """A response as a client sees it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Client:
    """Calls a gateway over ASGI."""

    gateway: Gateway
    models: Models
    audit: Path
    said: list[str]
    log: JsonLog
    health: HealthChecker

    async def post(
        self, body: Any, path: str = "/v1/completions", *, leaves_after: int | None = None, **more: str
    ) -> Answer:
        """`leaves_after`: the client closes the connection after so many parts of the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, leaves_after=leaves_after, **more)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, **headers)

    async def call(
        self, method: str, path: str, data: bytes = b"", *, leaves_after: int | None = None, **headers: str
    ) -> Answer:
        answer, left, sent = Answer(), asyncio.Event(), False
        if leaves_after == 0:
            asyncio.get_running_loop().call_later(0.05, left.set)

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await left.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                answer.parts.append(message["body"])
                if len(answer.parts) == leaves_after:
                    left.set()

        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs}
        async with asyncio.timeout(60):
            await self.gateway(scope, receive, send)
        return answer

    def lines(self) -> list[dict[str, Any]]:
        """The audit log."""
        self.log.flush()
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@asynccontextmanager
async def gateway_of(
    folder: Path,
    *replicas: FakeReplica,
    limiter: Limiter | None = None,
    gateway: dict[str, Any] | None = None,
    health: bool = False,
    slow_tick_s: float | None = None,
    more_models: list[dict[str, Any]] | None = None,
    **model: Any,
) -> AsyncIterator[Client]:
    """A gateway whose model `bot` has these replicas; `health`: it checks them meanwhile; `slow_tick_s`: and looks
    every so often whether their streams are slow."""
    for replica in replicas:
        if replica.server is None:
            await replica.start()
    table = {"name": "bot", "replicas": [{"url": replica.url} for replica in replicas], "policy": "round-robin"} | model
    config = build(GatewayConfig, {"gateway": gateway or {}, "models": [table, *(more_models or [])]}, "test")
    folder.mkdir(parents=True, exist_ok=True)
    log, said = JsonLog(folder / "audit.jsonl"), list[str]()
    keys = KeyFile(folder / "keys.json")
    app, models = make_gateway(config, keys, KeyRing(keys), limiter or LocalLimiter(), log)
    checker = HealthChecker(models, config.gateway, said.append)
    pools = [replica.link.pool for _, replica in models.replicas()]
    beside = [sweep(lambda: pools), *([checker.run()] if health else [])]
    if slow_tick_s is not None:
        beside.append(SlowReplicas(models, config.gateway, said.append, tick_s=slow_tick_s).run())
    tasks = [asyncio.create_task(each) for each in beside]
    try:
        yield Client(app, models, folder / "audit.jsonl", said, log, checker)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in pools:
            pool.close()
        log.close()
        for replica in replicas:
            await replica.stop()


def scenario(test: Callable[..., Awaitable[None]]) -> Callable[[Path], None]:
    """An async test with a folder of its own, as a plain one; one that waits for ever fails after five minutes."""

    async def limited(tmp_path: Path) -> None:
        async with asyncio.timeout(300):
            await test(tmp_path)

    def run(tmp_path: Path) -> None:
        asyncio.run(limited(tmp_path))

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


async def until(check: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.005)
