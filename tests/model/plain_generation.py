"""Reference generation, the slow twin of the serving engine: prefill, then one token at a time over a contiguous cache.

Easy to read, batched, reproducible per prompt in any batch (except dynamic and longrope positions, whose frequencies
follow the longest sequence of the batch, as in transformers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from armillary.engine.generate import check_prompts, check_tokenizer
from armillary.engine.request.sampling_params import Sampling
from armillary.errors import BadModel
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from tests.model.contiguous_cache import ContiguousCache

# B prompts, T tokens, V vocabulary
OnToken = Callable[[int, int], None]


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
