"""Thousands of requests made from the server's own OpenAPI document: no 5xx, no hang, no crash."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.api.tiny import run_server

pytestmark = pytest.mark.slow
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis comes with the dev extra")
def test_no_request_that_can_be_made_is_too_much(folder: Path) -> None:
    """Answers are kept short, so that the time goes into requests."""
    with run_server(folder, "--set", "serve.max_answer=8") as server:
        line = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS,
                "--max-examples", "400", "--phases", "examples,coverage,fuzzing", "--request-timeout", "30",
                "--no-color", "--seed", "1"]  # fmt: skip
        ran = subprocess.run(line, capture_output=True, text=True, timeout=1500, cwd=folder.parent)
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        server.until(server.is_ready)
        assert server.metric("restarts_total") == 0 and server.metric("inflight") == 0
        assert server.post("/v1/completions", {"prompt": "def", "max_tokens": 2})[0] == 200
