"""Redis and nginx of a service's own: there while it runs, gone with it, and one line where they cannot start."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from armillary.cli.up import backed
from armillary.errors import ArmillaryError, BadInput, MissingPart
from armillary.fleet.gateway.gateway_config import GatewaySettings
from armillary.fleet.pool import backing_services
from armillary.fleet.pool.backing_services import nginx_server, redis_server
from armillary.serving.http.server import ListenOptions
from armillary.spec.recipe import recipe_from_dict

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def said_by(address: str, line: bytes) -> bytes:
    """Redis's answer to an inline command."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2].partition("/")[0])), 5) as sock:
        sock.sendall(line + b"\r\n")
        return sock.recv(100)


@needs_redis
def test_what_redis_knows_outlives_it(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as address:
        assert said_by(address, b"SET spent 7") == b"+OK\r\n"
    with pytest.raises(OSError):
        said_by(address, b"PING")
    with redis_server(tmp_path / "redis") as address:
        assert b"7" in said_by(address, b"GET spent")


@needs_redis
def test_it_ends_with_a_service_that_is_killed(tmp_path: Path) -> None:
    code = "from pathlib import Path; from armillary.fleet.pool.backing_services import redis_server; import time\n"
    code += f"with redis_server(Path({str(tmp_path)!r})) as address: print(address, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        address = service.stdout.readline().decode().strip()
        assert said_by(address, b"PING") == b"+PONG\r\n"
        os.kill(service.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while True:
        try:
            said_by(address, b"PING")
        except OSError:
            return
        assert time.monotonic() < end, "Redis outlives its service"
        time.sleep(0.05)


@needs_redis
@needs_nginx
def test_a_recipe_that_wants_both(tmp_path: Path) -> None:
    port, said = free_port(), list[str]()
    recipe = recipe_from_dict({"model": {"path": "bot"}, "fleet": {"redis": True, "nginx_port": port}})
    with backed(recipe, GatewaySettings(), ListenOptions(port=9), tmp_path, said.append) as settings:
        assert said_by(settings.redis, b"PING") == b"+PONG\r\n" and settings.redis in said[0]
        with pytest.raises(OSError, match="404"):  # only /v1 and the probes are let through
            urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
        with pytest.raises(OSError, match="502"):  # no gateway listens there
            urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/", timeout=5)


@pytest.mark.parametrize(
    ("fleet", "gateway", "port", "wrong"),
    [
        ({"redis": True}, {"redis": "redis://elsewhere"}, 9000, "leave one of them out"),
        ({"nginx_port": 8080}, {}, 0, "give --port"),
    ],
)
def test_what_does_not_fit(fleet: dict[str, object], gateway: dict[str, str], port: int, wrong: str) -> None:
    recipe, settings = recipe_from_dict({"model": {"path": "bot"}, "fleet": fleet}), GatewaySettings(**gateway)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=wrong), backed(recipe, settings, ListenOptions(port=port), Path("x"), print):
        pass


def test_what_is_missing_or_broken_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing_services.shutil, "which", lambda *_, **__: sys.executable)  # nothing is started
    taken = socket.create_server(("127.0.0.1", 0))
    with (
        taken,
        pytest.raises(ArmillaryError, match="in use already"),
        nginx_server(tmp_path, taken.getsockname()[1], ""),
    ):
        pass
    monkeypatch.setattr(backing_services.shutil, "which", lambda *_, **__: None)
    with pytest.raises(MissingPart, match="redis-server is not installed"), redis_server(tmp_path):
        pass


@needs_nginx
def test_a_configuration_that_nginx_refuses(tmp_path: Path) -> None:
    with pytest.raises(ArmillaryError, match=r"nginx\.log says why"), nginx_server(tmp_path, free_port(), "nonsense;"):
        pass
