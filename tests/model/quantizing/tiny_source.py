"""A tiny model folder with a tokenizer, whose channels differ as much as those of trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.spec.hf.config import from_hf
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model

TEXT = "".join(f"def f_{i}(x):\n    return x * {i} + len(str(x)) % {i + 3}\n" for i in range(400))


def write_source(folder: Path, dtype: str = "bf16", **changes: Any) -> ModelSource:
    tokenizer = train_tokenizer([TEXT], 320)
    tokenizer.save(folder / "tokenizer")
    raw = {
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    model = build(from_hf(raw | changes, name="tiny"), dtype=torch.float32, device="cpu", seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
            else:
                parameter.mul_(torch.exp(0.8 * torch.randn(parameter.shape, generator=generator)))
    save_model(model, folder / "plain", dtype=dtype, template=folder / "tokenizer")
    return resolve_model(str(folder / "plain"), Home.at(folder), need_weights=True)


def write_text(path: Path) -> Path:
    path.write_text(TEXT)
    return path
