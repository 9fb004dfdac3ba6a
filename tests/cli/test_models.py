"""`armillary models`: the catalogue, and everything about one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.spec import catalogue
from tests.model.quantized.folders import tiny_llama
from tests.model.weights.test_gguf_weights import MIXED, write_gguf

Cli = Callable[..., Any]
LLAMA_3_8B = 8_030_261_248


def test_the_list_fits_a_hundred_columns(cli: Cli) -> None:
    lines = cli("models").out.splitlines()
    header = ["name", "params", "active", "layers", "hidden", "heads/kv", "context", "KV/token", "family"]
    assert lines[0].split() == header
    assert any(line.split()[:3] == ["llama-3-8b", "8.03", "B"] for line in lines)
    assert max(map(len, lines)) <= 100


def test_the_list_as_json_and_as_bare_names(cli: Cli) -> None:
    listed = cli("models", "--json").json
    assert {row["name"]: row["parameters"] for row in listed}["llama-3-8b"] == LLAMA_3_8B
    assert cli("models", "-q").out.splitlines() == list(catalogue.models())


def test_one_model(cli: Cli) -> None:
    out = cli("models", "llama-3-8b").out
    assert "8,030,261,248 (8.03 B)" in out
    assert "131 kB per token, 1.07 GB at 8,192 tokens" in out
    assert "can build it" in out and "weights in bf16   16.1 GB" in out
    assert cli("models", "llama-3-8b", "-q").out == f"{LLAMA_3_8B}\n"


def test_one_model_as_json_has_the_breakdown_and_the_config(cli: Cli) -> None:
    facts = cli("models", "llama-3-8b", "--json").json
    parts = {"embedding", "positions", "attention", "mlp", "router", "experts", "shared", "norms", "head"}
    assert sum(facts["breakdown"][part] for part in parts) == LLAMA_3_8B
    assert facts["config"]["hidden"] == 4096 and facts["unbuildable"] is None


def test_mixtures_show_active_parameters(cli: Cli) -> None:
    facts = cli("models", "mixtral-8x7b", "--json").json
    assert facts["parameters"] == 46_702_792_704 > facts["active_parameters"]


def test_a_config_file_is_a_model_too(cli: Cli, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = cli("models", str(tmp_path / "config.json"), "--json").json
    assert facts["num_layers"] == 2 and facts["source"].startswith("config")


@pytest.mark.parametrize("name", ["lama-3-8b", "Llama-3-8b-"])
def test_a_misspelt_model_gets_the_nearest(cli: Cli, name: str) -> None:
    ran = cli("models", name)
    assert ran.code == 2
    assert f"error: no model '{name}'; did you mean llama-3-8b?" in ran.err


def test_a_missing_file_is_one_line(cli: Cli) -> None:
    ran = cli("models", "./nowhere/config.json")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "./nowhere/config.json" in ran.err


def test_a_gguf_file_shows_what_its_weights_take(cli: Cli, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1), "llama", MIXED)
    shown = cli("models", str(path))
    assert "gguf, packed in memory too" in shown.out and "weights as stored" in shown.out
    assert cli("models", str(path), "--json").json["stored_bytes"] == path.stat().st_size
