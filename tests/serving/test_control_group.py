"""A server in a control group of 4 GB and one CPU: its KV cache fits, and a full one is survived."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from armillary.machine.cgroup import groups
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from tests.model.layers.test_attention_forms import small
from tests.serving.streams import Streamed, stream
from tests.serving.tiny import TEXT, run_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

LIMIT = 4_000_000_000
ROOM = 500_000_000
"""of the limit that the cache must leave to weights, activations and the server's two processes"""
LAYERS, HEADS, DIM, CONTEXT = 2, 128, 256, 1024
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4
"""keys and values of a token in fp32"""
PROMPT, ANSWER = 200, 20
IN_GROUP = 'for file in $GROUPS_OF_TEST; do echo $$ > "$file" || exit 97; done; exec "$@"'


class Box:
    """Groups of 4 GB and one CPU below this process's own, so that its own limits still hold."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.memory = self._make("memory", {2: [("memory.max", LIMIT)], 1: [("memory.limit_in_bytes", LIMIT)]})
        self._make(
            "cpu",
            {2: [("cpu.max", "100000 100000")], 1: [("cpu.cfs_period_us", 100_000), ("cpu.cfs_quota_us", 100_000)]},
        )

    def _make(self, controller: str, limits: dict[int, list[tuple[str, object]]]) -> Path:
        own = next(iter(groups(controller)), None)
        if own is None:
            pytest.skip(f"no control group of '{controller}' can be seen")
        folder = own.folder / f"armillary-test-{os.getpid()}"
        try:
            if own.version == 2 and not folder.is_dir():
                (own.folder / "cgroup.subtree_control").write_text(f"+{controller}")
            folder.mkdir(exist_ok=True)
            self.folders = [*dict.fromkeys([*self.folders, folder])]
            for name, value in limits[own.version]:
                (folder / name).write_text(str(value))
        except OSError as error:
            self.remove()
            pytest.skip(f"no control group can be created in {own.name} ({error.strerror})")
        return folder

    @property
    def line(self) -> list[str]:
        """What a command begins with to run in them."""
        files = " ".join(str(folder / "cgroup.procs") for folder in self.folders)
        return ["env", f"GROUPS_OF_TEST={files}", "sh", "-c", IN_GROUP, "sh"]

    def most_bytes(self) -> int:
        """Memory that was ever taken together."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        return next(int((self.memory / name).read_text()) for name in names if (self.memory / name).exists())

    def remove(self) -> None:
        """Once nobody is left in them."""
        for folder in self.folders:
            for _ in range(100):
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.05)


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    try:
        yield made
    finally:
        made.remove()


def wide_folder(path: Path) -> Path:
    """A model that computes little and remembers much: a few thousand tokens fill a cache of a gigabyte."""
    tokenizer = train_tokenizer([TEXT] * 20, 320)
    tokenizer.save(path / "tokenizer")
    config = small(
        vocab=tokenizer.vocab_size, context=CONTEXT, num_layers=LAYERS, heads=HEADS, kv_heads=HEADS, head_dim=DIM
    )
    return save_model(
        build(config, dtype=torch.float32, device="cpu", seed=3), path / "wide", template=path / "tokenizer"
    )


def test_a_process_knows_the_limits_of_its_group(box: Box) -> None:
    code = (
        "from armillary.machine.memory import limit_bytes; from armillary.machine.cores import compute_threads; "
        "print(int(limit_bytes()), compute_threads())"
    )
    said = subprocess.run([*box.line, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    limit, threads = map(int, said.stdout.split())
    assert LIMIT - 4096 <= limit <= LIMIT and threads == 1


@pytest.mark.slow
def test_a_server_in_a_group_survives_a_full_cache(tmp_path: Path, box: Box) -> None:
    unpaced = ("--set", "serve.prefill_tokens=2048")  # prompts come in quicker than short answers end
    with run_server(wide_folder(tmp_path), *unpaced, before=box.line) as server:
        server.until(lambda: server.metric("kv_capacity_tokens") > 0)
        capacity = int(server.metric("kv_capacity_tokens"))
        assert 0.05 * LIMIT < capacity * TOKEN_BYTES < LIMIT - ROOM, f"{capacity} tokens"
        count = -(-capacity // (PROMPT + ANSWER)) + 4
        most_used = 0.0

        async def ask_all() -> list[Streamed]:
            nonlocal most_used
            asked = [
                asyncio.create_task(
                    stream(
                        server,
                        {
                            "prompt": [2 + (i * 31 + at * (i + 7)) % 300 for at in range(PROMPT)],
                            "max_tokens": ANSWER,
                            "ignore_eos": True,
                            "stream": True,
                        },
                        timeout_s=300,
                    )
                )
                for i in range(count)
            ]
            while not all(task.done() for task in asked):
                used = await asyncio.to_thread(server.metric, "kv_used_fraction")
                most_used = max(most_used, used)
                await asyncio.sleep(0.1)
            return [await task for task in asked]

        found = asyncio.run(ask_all())
        assert all(one.status == 200 and one.done for one in found), [one.error for one in found if not one.done]
        assert most_used > 0.85, f"the cache was never full: {most_used}"
        assert server.metric("restarts_total") == 0 and box.most_bytes() <= LIMIT
