"""Tokenizers in GGUF files whose values are of the wrong kind or size: one line, no memory, no minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadModel
from armillary.store.gguf.gguf_config import to_hf_config
from armillary.store.gguf.gguf_header import GgufHeader, GgufTensor
from armillary.store.gguf.gguf_tokenizer import tokenizer_files

TOKENS = ["a", "b", "ab"]
BYTE_LEVEL = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": ["a b"]}
PIECES = {"model": "llama", "tokens": TOKENS, "scores": [0.0, 0.0, 1.0]}


def header_of(fields: dict[str, Any]) -> GgufHeader:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return GgufHeader(path=Path("m.gguf"), metadata=metadata, tensors={})


@pytest.mark.parametrize("good", [BYTE_LEVEL, PIECES])
@pytest.mark.parametrize("value", [7, 1.5, [], [1], ["x"], [[1]], True, "x", [float("nan")] * 3])
def test_values_of_the_wrong_kind(good: dict[str, Any], value: Any) -> None:
    assert tokenizer_files(header_of(good))["tokenizer.json"]["model"]["merges"] == [["a", "b"]]
    for key in (*good, "token_type"):
        if type(value) is type(good.get(key, TOKENS)) and key in ("scores", "token_type"):
            continue
        with pytest.raises(BadModel, match=r"^m\.gguf: .*(metadata|not supported|is not of its tokens)"):
            tokenizer_files(header_of(good | {key: value}))


@pytest.mark.parametrize("tokens", [["a" * n for n in range(1, 3000)], ["a" * 10_000_000]])
def test_long_pieces_are_refused_before_they_are_divided(tokens: list[str]) -> None:
    with pytest.raises(BadModel, match="too long or make too many merges"):
        tokenizer_files(header_of(PIECES | {"tokens": tokens, "scores": [0.0] * len(tokens)}))


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_rope_divisors_of_zero_are_no_rule(kind: str, tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(bytes(64))
    sizes = dict.fromkeys(("embedding_length", "feed_forward_length", "context_length"), 32)
    sizes |= {"block_count": 1, "attention.head_count": 2, "vocab_size": 32}
    fields = {f"llama.{key}": value for key, value in sizes.items()}
    fields |= {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {"rope_freqs.weight": GgufTensor(kind, (8,), 0, 32)}
    with pytest.raises(BadModel, match="follow no rule we know"):
        to_hf_config(GgufHeader(path=path, metadata=fields, tensors=tensors))
