"""A prefill and a decode server as a user starts them: one text, and either may be killed without a hung client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.disaggregation.test_disaggregation import free_address
from tests.serving.tiny import Server, run_server

PROMPT = "def main(): return value, other, " * 30
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
SETTINGS = ("--set", "serve.kv_bytes=20MB", "--set", "serve.dtype=fp32", "--set", "serve.max_tokens_per_step=256")


def role(name: str, address: str, ranks: int) -> tuple[str, ...]:
    return *SETTINGS, "--set", f"serve.role={name}", "--set", f"serve.prefill={address}", "--tp", str(ranks)


def text_of(server: Server, body: dict[str, Any] = BODY) -> str:
    status, found = server.post("/v1/completions", body)
    assert status == 200, found
    return str(found["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_two_servers_give_the_text_of_one_and_either_may_be_killed(folder: Path, ranks: tuple[int, int]) -> None:
    address = free_address(ranks[0])
    prefills, decodes = role("prefill", address, ranks[0]), role("decode", address, ranks[1])
    with run_server(folder, *SETTINGS) as one:
        expected = text_of(one)
        other = BODY | {"prompt": "x = [1, 2.5] # " + PROMPT}
        expected_other = text_of(one, other)
    with run_server(folder, *prefills) as prefill, run_server(folder, *decodes) as decode:
        assert set(prefill.engine_pids()).isdisjoint(decode.engine_pids())
        decode.until(lambda: decode.metric("prefill_connected") == 1)
        assert text_of(decode) == expected
        decode.until(lambda: decode.metric("kv_fetched_total") == 1)
        received = decode.metric("kv_received_bytes_total")
        prefill.until(lambda: prefill.metric("kv_sent_bytes_total") == received > 0)

        said: list[tuple[int, Any]] = []
        long = BODY | {"max_tokens": 600}
        clients = [threading.Thread(target=lambda: said.append(decode.post("/v1/completions", long))) for _ in range(3)]
        for client in clients:
            client.start()
        decode.until(lambda: decode.metric("running") >= 1)
        *_, last = prefill.engine_pids()
        os.kill(last, signal.SIGKILL)  # running decodes go on, and new prompts are computed by the decode server
        assert text_of(decode, other) == expected_other
        for client in clients:
            client.join(60)
        assert [status for status, _ in said] == [200] * 3
        prefill.until(prefill.is_ready, 60)  # its server started another engine
        decode.until(lambda: decode.metric("prefill_connected") == 1)

        *_, last = decode.engine_pids()
        os.kill(last, signal.SIGKILL)
        prefill.until(lambda: prefill.metric("decode_servers") == 0)
        prefill.until(lambda: prefill.metric("kv_used_fraction") == 0)  # its blocks are free
        decode.until(lambda: decode.is_ready() and decode.metric("prefill_connected") == 1, 60)
        assert text_of(decode) == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--set", "serve.role=decode", "--set", "serve.prefill=h:9", "--set", "serve.pp=2"), "leave serve.pp 1"),
        (("--set", "serve.role=prefill"), "needs serve.prefill=HOST:PORT"),
    ],
)
def test_one_line_says_what_cannot_be(folder: Path, flags: tuple[str, ...], says: str) -> None:
    line = [sys.executable, "-m", "armillary", "serve", str(folder), "--device", "cpu", *flags]
    done = subprocess.run([*line, "--set", "serve.dtype=fp32"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
