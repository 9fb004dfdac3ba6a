"""Requests made from the gateway's own OpenAPI document, to a real server behind it and to the admin API: no 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.gateway.admin_signature import AdminGuard
from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.server import ListenOptions, address_of, bind, http_server
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, until
from tests.fleet.gateway.test_admin import make_key
from tests.serving.generated_requests import run_schemathesis
from tests.serving.tiny import make_folder, run_server

pytestmark = pytest.mark.slow
PATHS = (
    "/v1/chat/completions",
    "/v1/completions|/tokenize|/detokenize",
    "/v1/messages|/v1/responses",
    "/v1/embeddings|/v1/rerank|/v1/score",
    "/v1/models|/health|/ready",
)


def only_bot(document: Any) -> None:
    """Ask for the model that there is, so that requests are forwarded."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"type": "string", "enum": ["bot"]}
            schema["required"] = sorted({*schema.get("required", ()), "model"})


@contextmanager
def gateway_in_a_thread(folder: Path, *replicas: FakeReplica, url: str = "", admin: bool = False) -> Iterator[str]:
    """Its address; `url` is that of a server beside or instead of the replicas."""
    started, ended, found = threading.Event(), threading.Event(), list[str]()
    settings = {"admin_keys": str(make_key(folder / "admin").with_suffix(".pub"))} if admin else {}
    more = {"replicas": [{"url": url}]} if url else {}

    async def serve() -> None:
        async with gateway_of(folder, *replicas, gateway=settings, **more) as client:
            sock = bind(ListenOptions(port=0))
            server = http_server(client.gateway, graceful_s=1)
            task = asyncio.create_task(server.serve(sockets=[sock]))
            await until(lambda: server.started)
            found.append(address_of(sock))
            started.set()
            await asyncio.to_thread(ended.wait)
            server.should_exit = True
            await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield found[0]
    finally:
        ended.set()
        thread.join(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    with run_server(folder, "--set", "serve.max_answer=8", "--set", "serve.name=bot") as running:
        yield running.url


@pytest.mark.parametrize("paths", PATHS)
def test_forwarded_paths(server: str, tmp_path: Path, paths: str) -> None:
    with gateway_in_a_thread(tmp_path, url=server) as url:
        assert run_schemathesis(url, paths, tmp_path, examples=100, change=only_bot) > 10


def test_the_admin_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed or not; for the calls that are, the signature is taken as checked."""
    with gateway_in_a_thread(tmp_path, FakeReplica(), admin=True) as url:
        assert run_schemathesis(url, "/admin/", tmp_path, examples=20) > 50, "not signed"

        async def is_signed(self: AdminGuard, connection: AsgiConnection, body: bytes) -> None:
            pass

        monkeypatch.setattr(AdminGuard, "check", is_signed)
        assert run_schemathesis(url, "/admin/", tmp_path, examples=100) > 200
