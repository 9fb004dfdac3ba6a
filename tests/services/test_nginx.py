"""nginx in front of the server, with its default buffering: tokens still arrive one by one."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serving.tiny import make_folder, run_server

pytestmark = pytest.mark.services

CONFIG = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {server}; proxy_http_version 1.1; }}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, server: str) -> Iterator[tuple[str, int]]:
    """nginx as a reverse proxy of `server`; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=address[1], server=server))
    process = subprocess.Popen(["nginx", "-c", str(config), "-e", str(folder / "error.log")])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(address) == 0:
                    break
            assert process.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_a_stream_is_not_held_back(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "def", "max_tokens": 40, "stream": True, "ignore_eos": True})
    with run_server(make_folder(tmp_path / "tiny")) as server, nginx(tmp_path, server.url) as address:
        connection = http.client.HTTPConnection(*address, timeout=60)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
        pieces = []
        while piece := response.read1(65536):
            pieces.append(piece)
        connection.close()
    assert b"".join(pieces).rstrip().endswith(b"data: [DONE]")
    assert len(pieces) > 5, "nginx passes events on as they come"
