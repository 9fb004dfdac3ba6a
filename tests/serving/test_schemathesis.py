"""Thousands of requests made from the server's own OpenAPI document: no 5xx, no hang, no crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.generated_requests import run_schemathesis
from tests.serving.tiny import Server, run_server

pytestmark = pytest.mark.slow
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
    assert run_schemathesis(terse.url, path, folder.parent) >= LEAST[path]
    terse.until(terse.is_ready)
    assert terse.metric("restarts_total") == 0 and terse.metric("inflight") == 0
    assert terse.post("/v1/completions", {"prompt": "def", "max_tokens": 2})[0] == 200
