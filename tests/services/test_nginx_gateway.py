"""The written configuration with a real nginx: streams arrive token by token, limits hold, the rest stays inside."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.fleet.gateway.gateway_config import GatewaySettings
from armillary.fleet.gateway.nginx_config import NginxSettings, longest_silence_s, nginx_config
from tests.fleet.gateway.replicas import FakeReplica, scenario
from tests.fleet.gateway.test_gateway_app import listening, make_certificate

pytestmark = pytest.mark.services

MAIN = """daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  include {folder}/gateway.conf;
}}
"""


@asynccontextmanager
async def nginx(folder: Path, **settings: object) -> AsyncIterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    (folder / "gateway.conf").write_text(nginx_config(NginxSettings(port=port, **settings)))  # type: ignore[arg-type]
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    process = subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf")])
    try:
        end = time.monotonic() + 20
        while True:
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None, (folder / "error.log").read_text()
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


async def post(
    port: int, body: dict[str, object], path: str = "/v1/completions", more: str = ""
) -> tuple[int, list[float], bytes]:
    """(status, arrival times of tokens, everything); `more` headers end with a line break."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{more}content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    times, received = list[float](), b""
    while part := await reader.read(65536):
        times += [time.monotonic()] * part.count(b'"tok"')
        received += part
    writer.close()
    return int(received.split()[1]), times, received


@scenario
async def test_streams_limits_and_paths(tmp_path: Path) -> None:
    replica = FakeReplica(tokens=6, gap_s=0.1)
    async with (
        listening(tmp_path, replica) as address,
        nginx(tmp_path, gateways=[f"127.0.0.1:{address[1]}"], max_body_bytes=10_000) as port,
    ):
        status, times, text = await post(port, {"model": "bot", "prompt": "x", "stream": True})
        assert status == 200 and len(times) == 6 and text.rstrip().endswith(b"0")
        assert times[-1] - times[0] > 0.3, "not all at once at the end"
        sent = replica.heads[0].split("x-request-id: ")[1].split("\r\n")[0]
        assert sent.encode() in text.split(b"\r\n\r\n")[0], "nginx's request id goes through to the replica and back"
        assert (await post(port, {"model": "bot", "prompt": "x" * 20_000}))[0] == 413
        assert (await post(port, {}, "/metrics"))[0] == 404


@scenario
async def test_a_gateway_with_tls_and_a_root_path_and_the_clients_own_request_id(tmp_path: Path) -> None:
    replica, tls = FakeReplica(), make_certificate(tmp_path)
    async with (
        listening(tmp_path, replica, tls, root_path="/llm/") as address,
        nginx(tmp_path, gateways=[f"127.0.0.1:{address[1]}"], gateway_tls=True, root_path="/llm") as port,
    ):
        asked = {"model": "bot", "prompt": "x"}
        assert (await post(port, asked))[0] == 404
        status, _, text = await post(port, asked, "/llm/v1/completions", "x-request-id: trace-7\r\n")
        assert status == 200 and b"x-request-id: trace-7\r\n" in text.lower()
        assert "x-request-id: trace-7\r\n" in replica.heads[0]


def test_nginx_waits_longer_than_the_gateway_may() -> None:
    """Else a client gets nginx's page instead of the gateway's error."""
    patient = GatewaySettings(first_token_timeout_s=300.0, retries=2, max_wait_s=40.0)
    assert longest_silence_s(patient) > 3 * 300 + 40
    assert longest_silence_s(GatewaySettings(idle_timeout_s=1e4)) == 1e4
    written = nginx_config(NginxSettings(gateways=["a:1"], longest_silence_s=longest_silence_s(patient)))
    (read_s,) = [int(line.split()[1].rstrip("s;")) for line in written.splitlines() if "proxy_read_timeout" in line]
    assert read_s > longest_silence_s(patient)


def test_what_cannot_be_written() -> None:
    for settings, says in (
        ({"gateways": ["127.0.0.1:9000; evil"]}, "is not an address"),
        ({"gateways": []}, "no gateway given"),
        ({"gateways": ["a:1"], "server_name": "x; y"}, "is not a server name"),
        ({"gateways": ["a:1"], "certificate": Path("c")}, "needs both"),
        ({"gateways": ["a:1"], "root_path": "/x { }"}, "is not a path for nginx"),
    ):
        with pytest.raises(BadInput, match=says):
            NginxSettings(**settings)  # type: ignore[arg-type]
