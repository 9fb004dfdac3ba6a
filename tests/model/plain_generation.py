"""Text to text by the reference generation, for comparison with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from armillary.model.reference_generate import Sampling, check_tokenizer, generate_tokens
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.hf_weights import load_model


def plain_completions(folder: Path, prompts: Sequence[str], sampling: Sampling) -> list[tuple[list[int], str, str]]:
    """(tokens, text, finish) of each prompt, on the CPU."""
    model, tokenizer = load_model(folder, dtype="fp32", device="cpu"), Tokenizer.load(folder)
    check_tokenizer(model, tokenizer)
    stops = set(tokenizer.eos_ids)
    outputs = generate_tokens(model, [tokenizer.encode(prompt) for prompt in prompts], sampling, stop_ids=tuple(stops))
    return [
        (
            tokens,
            tokenizer.decode([token for token in tokens if token not in stops]),
            "stop" if tokens[-1] in stops else "length",
        )
        for tokens in outputs
    ]
