"""A server with data-parallel attention: the text of one rank, n times the KV cache, and a lost rank."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tiny import Server, make_folder, run_server

MOE = {"num_experts": 4, "top_k": 2, "ffn": 16}
DP = ("--devices", "2", "--set", "serve.dp_attention=2", "--set", "serve.ep=2")
SIZES = ("--set", "serve.kv_bytes=8MB", "--set", "serve.dtype=fp32")
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("moe"), family="mixtral", ffn=0, moe=MOE)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Of every kind whose results another rank sends back."""
    texts = [{"prompt": "def main" * (1 + i), "max_tokens": 20 + i, "logprobs": 1} for i in range(6)]
    drawn = {"prompt": "0123", "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2}
    shared = {"model": "tiny", "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "name"}], "max_tokens": 24, "response_format": SCHEMA}
    made = [("/v1/completions", shared | each) for each in [*texts, drawn]]
    return [
        *made,
        *[("/v1/chat/completions", shared | chat)] * 2,
        *[("/v1/embeddings", {"model": "tiny", "input": "value"})] * 2,
    ]


def answers(server: Server) -> list[Any]:
    """All at once, so that both ranks have some."""
    wanted = bodies()
    found: list[Any] = [None] * len(wanted)

    def call(at: int) -> None:
        status, body = server.post(*wanted[at])
        assert status == 200, body
        if "data" in body:
            found[at] = [round(value, 4) for value in body["data"][0]["embedding"]]
        else:
            found[at] = [
                (choice.get("text"), choice.get("message"), choice["finish_reason"]) for choice in body["choices"]
            ]

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.slow
def test_a_server_says_what_it_says_on_one_rank(moe: Path) -> None:
    with run_server(moe, *SIZES) as server:
        expected, tokens = answers(server), server.metric("kv_capacity_tokens")
        assert None not in expected
    with run_server(moe, *DP, *SIZES) as server:
        assert len(server.engine_pids()) == 2
        assert answers(server) == expected
        assert server.metric("kv_capacity_tokens") == 2 * tokens and server.metric("dp_ranks") == 2


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_killing_a_rank_ends_no_client_in_silence(moe: Path, rank: int) -> None:
    body = {"model": "tiny", "prompt": "def main", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    with run_server(moe, *DP, *SIZES) as server:
        assert "\nthreads " not in server.log.read_text(), "each copy has its part of the cores"
        pids, said = server.engine_pids(), list[tuple[int, Any]]()
        clients = [threading.Thread(target=lambda: said.append(server.post("/v1/completions", body))) for _ in range(4)]
        for client in clients:
            client.start()
        server.until(lambda: server.metric("running") >= 2)
        os.kill(pids[rank], signal.SIGKILL)
        for client in clients:
            client.join(30)
        assert [status for status, _ in said] == [503] * 4
        assert all("the engine failed" in found["error"]["message"] for _, found in said)
        server.until(lambda: server.metric("restarts_total") == 1 and server.is_ready(), 60)
        assert set(server.engine_pids()).isdisjoint(pids) and len(server.engine_pids()) == 2
        assert server.post("/v1/completions", body | {"max_tokens": 4})[0] == 200
