"""What a server takes from the machine and the model where nobody says: a length that the KV cache can hold, and the
sampling parameters of generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadModel
from armillary.model.generation_config import SamplingDefaults
from armillary.serving.openai.run_server import served_model
from armillary.serving.processes.engine_ipc import EngineConfig
from armillary.serving.processes.server_metrics import Metrics
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from tests.serving.tiny import CONTEXT, Server, run_server

HELLO: list[Any] = [{"role": "user", "content": "def main"}]
KV_BYTES = 100_000


OWN = {"temperature": 1.5, "top_k": 1, "max_new_tokens": 150, "do_sample": True, "top_p": None}


def with_defaults(folder: Path, target: Path, **more: Any) -> Path:
    """The model with sampling parameters of its own."""
    shutil.copytree(folder, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | OWN | more))
    return target


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = with_defaults(folder, tmp_path_factory.mktemp("own") / "tiny")
    with run_server(made, "--set", f"serve.kv_bytes={KV_BYTES}") as found:
        yield found


def test_a_chat_without_max_tokens_is_answered(small: Server) -> None:
    longest = json.loads(small.get("/v1/models")[1])["data"][0]["max_model_len"]
    assert 64 < longest < CONTEXT
    long: list[Any] = [{"role": "user", "content": "def main" * 60}]
    status, answer = small.post("/v1/chat/completions", {"messages": long, "temperature": 0, "ignore_eos": True})
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == longest
    assert small.log.read_text().count(f"max_model_len is {longest:,} and not the context of {CONTEXT:,}") == 1


def test_what_cannot_fit_is_still_refused_with_a_next_step(small: Server) -> None:
    status, answer = small.post("/v1/completions", {"prompt": "def main", "max_tokens": CONTEXT - 10})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded" and "at most" in str(answer)


def test_the_models_own_sampling_is_used_and_said(small: Server) -> None:
    def text(**given: Any) -> Any:
        return small.post("/v1/completions", {"prompt": "def main", "max_tokens": 24, "seed": 5, **given})[1]["choices"]

    assert text() == text(temperature=0) != text(top_k=0)
    line = "sampling defaults of the model (generation_config.json): temperature 1.5, top_k 1, max_new_tokens 150; "
    assert small.log.read_text().count(line) == 1
    short = small.post("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True})[1]
    assert short["usage"]["completion_tokens"] == 150 and short["choices"][0]["finish_reason"] == "length"


def test_they_can_be_turned_off_and_broken_ones_are_refused(folder: Path, tmp_path: Path) -> None:
    made, said = with_defaults(folder, tmp_path / "tiny"), list[str]()
    source = resolve_model(str(made), Home.at(tmp_path), need_weights=True)

    def defaults(**serve: Any) -> SamplingDefaults:
        config = EngineConfig(model=str(made), serve=Serve(**serve), home=Home.at(tmp_path))
        return served_model(source, config, 1, Metrics(), said.append).defaults

    assert defaults() == SamplingDefaults(temperature=1.5, top_k=1, max_new_tokens=150) and len(said) == 1
    assert defaults(generation_config="none") == SamplingDefaults() and len(said) == 1
    (made / "generation_config.json").write_text('{"temperature": "warm"}')
    with pytest.raises(BadModel, match=r"temperature='warm'.*try --set serve\.generation_config=none$"):
        defaults()
