"""Thousands of requests made from the server's own OpenAPI document: no 5xx, no hang, no crash."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.tiny import Server, run_server

pytestmark = pytest.mark.slow
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LEAST = {
    "/v1/chat/completions": 1000,
    "/v1/completions": 800,
    "/v1/messages": 300,
    "/v1/responses": 300,
    "/v1/embeddings": 200,
    "/v1/rerank|/v1/score": 400,
    "/tokenize": 500,
    "/detokenize": 300,
    "/v1/models|/health|/ready": 300,
}
"""cases of each path: every value of every field at its bounds and beyond, then random ones; some 3,500 in all"""


@pytest.fixture(scope="module")
def terse(folder: Path) -> Iterator[Server]:
    """Answers are kept short, so that the time goes into requests."""
    with run_server(folder, "--set", "serve.max_answer=16") as server:
        yield server


@pytest.mark.parametrize("path", LEAST)
def test_no_request_that_can_be_made_is_too_much(terse: Server, folder: Path, path: str) -> None:
    line = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{terse.url}/openapi.json",
        "--checks",
        CHECKS,
        "--max-examples",
        "400",
        "--phases",
        "coverage,fuzzing",
        "--request-timeout",
        "30",
        "--no-color",
        "--seed",
        "1",
        "--generation-database",
        "none",
        "--include-path-regex",
        f"^({path})",
    ]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=240, cwd=folder.parent)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert cases and cases[1] == cases[2] and int(cases[1]) >= LEAST[path], ran.stdout[-2000:]
    terse.until(terse.is_ready)
    assert terse.metric("restarts_total") == 0 and terse.metric("inflight") == 0
    assert terse.post("/v1/completions", {"prompt": "def", "max_tokens": 2})[0] == 200
