"""LoRA adapters over HTTP: `model` selects one, vLLM's routes load and unload them, and a restarted engine has them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.lora import adapters
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.train import TrainJob
from armillary.training.step.lora import add_lora, save_adapter
from tests.serving.tiny import Server, run_server

PROMPT = "def main"
TABLE = Serve(kv_bytes=2_000_000, max_adapters=2, adapter_rank=4, dtype="fp32")


@pytest.fixture(scope="module")
def loras(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `start/one` and `later`."""
    where, job = tmp_path_factory.mktemp("loras"), TrainJob(lora_rank=4, lora_alpha=8.0)
    model = load_model(folder, dtype=torch.float32)
    add_lora(model, job)
    for seed, name in enumerate(("start/one", "later")):
        generator = torch.Generator().manual_seed(seed)
        for _, module in adapters(model):
            module.lora_b.data.normal_(0, 0.5, generator=generator)
        (where / name).parent.mkdir(exist_ok=True)
        save_adapter(model.state_dict(), model.config, job, where / name, base=str(folder))
    return where


@pytest.fixture(scope="module")
def adapted_server(folder: Path, loras: Path) -> Iterator[Server]:
    wanted = {"kv_bytes": "2MB", "max_adapters": 2, "adapter_rank": 4, "dtype": "fp32", "runtime_adapters": "true"}
    settings = [f"serve.{name}={value}" for name, value in wanted.items()] + [f"serve.adapters={loras / 'start'}"]
    with run_server(folder, *(word for each in settings for word in ("--set", each))) as found:
        yield found


def answer(server: Server, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, found = server.post("/v1/completions", body)
    assert status == 200 and found["model"] == model, found
    text: str = found["choices"][0]["text"]
    return text


def expected(folder: Path, adapter: Path | None) -> str:
    llm = LLM(folder, TABLE, device="cpu")
    if adapter is not None:
        llm.load_adapter("x", adapter)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return llm.generate([PROMPT], params, adapter="x" if adapter else "")[0].text


def test_adapters_come_and_go_and_survive_a_restart(adapted_server: Server, folder: Path, loras: Path) -> None:
    server = adapted_server
    cards = _models(server)
    assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("one", "tiny")]
    first = answer(server, "one")
    assert first == expected(folder, loras / "start" / "one") and first != answer(server, "tiny")
    status, found = server.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(loras / "later")})
    assert (status, found) == (200, {"status": "loaded", "lora_name": "two"})
    assert answer(server, "two") == expected(folder, loras / "later")
    status, found = server.post("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": str(loras / "later")})
    assert status == 400 and "unload one or raise serve.max_adapters" in found["error"]["message"]
    os.kill(server.engine_pids()[0], signal.SIGKILL)
    server.until(lambda: server.metric("restarts_total") == 1 and server.is_ready())
    assert answer(server, "one") == first and answer(server, "two") == expected(folder, loras / "later")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 404
    status, found = server.post("/v1/completions", {"model": "two", "prompt": PROMPT})
    assert status == 404 and found["error"]["message"] == "no model 'two' on this server; use 'tiny' or 'one'"


def _models(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/v1/models")[1])["data"]
    return found


def test_a_broken_folder_is_named(adapted_server: Server, loras: Path, tmp_path: Path) -> None:
    shutil.copytree(loras / "later", tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    for path, why in ((tmp_path / "broken", "truncated or not safetensors"), (tmp_path, "no readable adapter_config")):
        status, found = adapted_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
        assert status == 400 and why in found["error"]["message"]
    status, found = adapted_server.post("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "/"})
    assert status == 400 and "is the model itself" in found["error"]["message"]


def test_clients_load_nothing_where_the_recipe_does_not_say_so(server: Server) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        status, found = server.post(path, {"lora_name": "x", "lora_path": "/"})
        assert status == 403 and "serve.runtime_adapters=true" in found["error"]["message"]
