"""A home of its own for every test, and tiny Hugging Face folders to publish, export and serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from armillary.store.home import Home
from tests.store.stand_in_hub import StandInHub

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "home")


def write_model(folder: Path, *, weights: bool = True) -> Path:
    """A folder that looks like a model; nobody here reads the tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    if weights:
        (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub on loopback, with an empty cache and nobody logged in."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    new_sessions()
    with StandInHub() as server:
        yield server
    new_sessions()


def new_sessions() -> None:
    """Versions before 1.0 fix offline mode when a session opens, so a test must not inherit one."""
    reset = getattr(import_module("huggingface_hub.utils"), "reset_sessions", None)
    if reset is not None:
        reset()
