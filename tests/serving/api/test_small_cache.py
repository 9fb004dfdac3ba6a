"""A server whose KV cache is smaller than the model's context: what is asked without limits is answered anyway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.api.tiny import CONTEXT, Server, run_server

HELLO: list[Any] = [{"role": "user", "content": "def main"}]
KV_BYTES = 100_000


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Server]:
    with run_server(folder, "--set", f"serve.kv_bytes={KV_BYTES}") as found:
        yield found


def test_a_chat_without_max_tokens_is_answered(small: Server) -> None:
    longest = json.loads(small.get("/v1/models")[1])["data"][0]["max_model_len"]
    assert 64 < longest < CONTEXT
    status, answer = small.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "ignore_eos": True})
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == longest
    assert small.log.read_text().count(f"max_model_len is {longest:,} and not the context of {CONTEXT:,}") == 1


def test_what_cannot_fit_is_still_refused_with_a_next_step(small: Server) -> None:
    status, answer = small.post("/v1/completions", {"prompt": "def main", "max_tokens": CONTEXT - 10})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded" and "at most" in str(answer)
