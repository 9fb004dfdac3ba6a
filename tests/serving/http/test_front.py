"""What servers do around their routes: ids, CORS, a root path and an access log that a full disk does not stop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import ArmillaryError
from armillary.serving.http import json_log
from armillary.serving.http.front import Front
from armillary.serving.http.json_log import JsonLog
from armillary.serving.http.server import ListenOptions


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def ask(front: Front, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "client": ("10.0.0.7", 1)}
        await front(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], given, b"".join(message.get("body", b"") for message in sent[1:])


def test_ids_cors_root_path_and_the_access_log(tmp_path: Path) -> None:
    listen = ListenOptions(cors_origins=("https://app.example",), root_path="/llm/", access_log=tmp_path / "a.jsonl")
    front = Front(app, listen, print)
    status, headers, body = ask(front, "/llm/v1/models", x_request_id="mine-1", origin="https://app.example")
    assert (status, headers["x-request-id"], body) == (200, "mine-1", b"/v1/models")
    assert headers["access-control-allow-origin"] == "https://app.example"
    assert ask(front, "/x", x_request_id="a b\n")[1]["x-request-id"].startswith("req-")
    asked = {"access_control_request_headers": "X-Stainless-Lang, authorization", "origin": "https://app.example"}
    status, headers, _ = ask(front, "/llm/v1/models", "OPTIONS", **asked)
    assert status == 204 and "x-stainless-lang" in headers["access-control-allow-headers"], "OpenAI's client sends it"
    front.close()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(line["path"], line["status"], line["client"]) for line in lines] == [
        ("/v1/models", 200, "10.0.0.7"), ("/x", 200, "10.0.0.7"), ("/v1/models", 204, "10.0.0.7")
    ]  # fmt: skip
    with pytest.raises(ArmillaryError, match="cannot write the log"):
        JsonLog(tmp_path / "a.jsonl" / "b")


def test_a_log_on_a_full_disk_is_bounded_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_log, "_MOST_LINES", 100)
    log = JsonLog(tmp_path / "access.jsonl")
    file, log._file = log._file, Full()  # type: ignore[assignment]
    for number in range(150):
        log.add(number=number)
    with pytest.raises(OSError, match="No space"):
        log.flush()
    log._file = file
    log.close()
    lines = (tmp_path / "access.jsonl").read_text().splitlines()
    assert len(lines) == 100 and '"number":149' in lines[-1]
