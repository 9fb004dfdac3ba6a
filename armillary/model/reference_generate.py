"""Plain generation: prefill the prompts, then one token at a time over a contiguous cache.

The slow twin of the serving engine: easy to read, batched, reproducible per prompt whatever stands beside it (but for
dynamic and longrope positions, whose frequencies follow the longest sequence of the batch, as in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from armillary.errors import BadInput, BadModel
from armillary.model.generation_config import sampling_defaults
from armillary.model.layers.attention_forms import ContiguousCache
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Transformer

# B prompts, T tokens, V vocabulary
OnToken = Callable[[int, int], None]


MODELS_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""fields of `Sampling` that a model's generation_config.json may set"""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    max_tokens: int = 128
    """tokens to make at most"""
    temperature: float = 0.8
    """0 is greedy"""
    top_k: int = 0
    """keep the k likeliest; 0: all"""
    top_p: float = 1.0
    """keep the likeliest tokens whose probabilities reach p"""
    min_p: float = 0.0
    """drop tokens less likely than this share of the likeliest one's probability"""
    repetition_penalty: float = 1.0
    """above 1: logits of tokens that came before, in the prompt too, are divided by it, negative ones multiplied"""
    seed: int = 0
    """prompt i draws with seed + i"""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens={self.max_tokens} makes nothing; ask for at least 1")
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise BadInput("sampling wants temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0")
        if not (0 <= self.min_p <= 1 and 0 < self.repetition_penalty < math.inf):
            raise BadInput("sampling wants 0 ≤ min_p ≤ 1 and repetition_penalty > 0")
        if not 0 <= self.seed < 2**62:
            raise BadInput(f"seed={self.seed} is not between 0 and 2^62; use a small whole number")


def default_sampling(folder: Path | None) -> Sampling:
    """What the model's generation_config.json says, where it says something."""
    own = sampling_defaults(folder).given
    return Sampling(**{name: value for name, value in own.items() if name in MODELS_OWN})


def check_tokenizer(model: Transformer, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids the model does not have."""
    if tokenizer.vocab_size > model.config.vocab:
        rows = f"the model has {model.config.vocab} rows and its tokenizer ids up to {tokenizer.vocab_size - 1}"
        raise BadModel(f"{model.config.name}: {rows}; use the tokenizer the model was trained with")


@torch.inference_mode()
def generate_tokens(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop_ids: Sequence[int] = (),
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Token ids that follow each prompt, the stop id included where one came."""
    check_prompts(model, prompts, sampling)
    device = next(model.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    cache = _cache(model, len(prompts), max(lengths) + sampling.max_tokens)
    draws = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    made: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    logits_BV = _prefill(model, cache, prompts, device)
    for step in range(sampling.max_tokens):
        chosen = [
            _draw(logits_V, [*prompt, *tokens], sampling, draw)
            for logits_V, prompt, tokens, draw in zip(logits_BV, prompts, made, draws, strict=True)
        ]
        for i, token in enumerate(chosen):
            if not done[i]:
                made[i].append(token)
                done[i] = token in stop_ids
                if on_token:
                    on_token(i, token)
        if all(done) or step + 1 == sampling.max_tokens:
            break
        positions_B1 = torch.tensor([[length + step] for length in lengths], device=device)
        tokens_B1 = torch.tensor([[token] for token in chosen], device=device)
        attend = cache.at(positions_B1, upto=max(lengths) + step + 1)
        logits_BV = model.head(model(tokens_B1, positions_B1, attend)[:, -1]).float().cpu()
    return made


def _prefill(
    model: Transformer, cache: ContiguousCache, prompts: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Logits after the last token of each prompt; shorter prompts are padded at the end, where nothing looks."""
    longest = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    positions_BT = torch.arange(longest, device=device).expand(len(prompts), -1)
    hidden_BTH = model(tokens_BT.to(device), positions_BT, cache.at(positions_BT, upto=longest))
    last_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return model.head(hidden_BTH[torch.arange(len(prompts), device=device), last_B]).float().cpu()


def _cache(model: Transformer, batch: int, length: int) -> ContiguousCache:
    first = next(model.parameters())
    return ContiguousCache(model.config, batch=batch, length=length, dtype=first.dtype, device=first.device)


def _draw(logits_V: Tensor, before: Sequence[int], sampling: Sampling, generator: torch.Generator) -> int:
    if not logits_V.isfinite().all():
        raise BadModel("the model's logits are not numbers; its weights are broken or its dtype too narrow")
    logits_V = _penalised(logits_V, before, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V / sampling.temperature
    if sampling.top_k:
        floor = scaled_V.topk(min(sampling.top_k, scaled_V.numel())).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < floor, -torch.inf)
    probabilities_V = scaled_V.softmax(dim=-1)
    if sampling.min_p:
        probabilities_V = probabilities_V.where(probabilities_V >= sampling.min_p * probabilities_V.max(), 0.0)
    if sampling.top_p < 1:
        ordered, order = probabilities_V.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities_V = probabilities_V.scatter(0, order[beyond], 0.0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _penalised(logits_V: Tensor, before: Sequence[int], penalty: float) -> Tensor:
    if penalty == 1:
        return logits_V
    seen = torch.tensor(sorted(set(before)))
    found = logits_V[seen]
    return logits_V.index_copy(0, seen, torch.where(found > 0, found / penalty, found * penalty))


def check_prompts(model: Transformer, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Refuse what the model cannot continue."""
    vocab, context = model.config.vocab, model.config.context
    if not prompts:
        raise BadInput("there is no prompt; give at least one")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput(f"prompt {i + 1} is empty; give at least one token")
        if max(prompt) >= vocab or min(prompt) < 0:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise BadInput(
                f"prompt {i + 1} has token {wrong} outside the model's vocabulary of {vocab}; use its tokenizer"
            )
        room = context - len(prompt)
        if room < sampling.max_tokens:
            wanted = f"{len(prompt)} + {sampling.max_tokens} tokens exceed the context of {context}"
            fix = f"ask for at most {room}" if room > 0 else "shorten the prompt"
            raise BadInput(f"prompt {i + 1}: {wanted}; {fix}")
