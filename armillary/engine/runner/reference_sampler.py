"""Reference sampling: every sequence by its own parameters and seed."""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from armillary.engine.request.sequence import Sequence
from armillary.kernels.sampling.cpu import sample
from armillary.kernels.sampling.sampling import Draws, Penalties

# S sequences, V vocabulary, W words of 32 tokens


def draw(
    logits_SV: Tensor, sequences: Items[Sequence], seeds: Items[int], tokens_ST: Tensor, ends: Items[int]
) -> Tensor:
    """Token ids [S]; -1 where logits are not finite. `tokens_ST` holds the ends[s] tokens of sequence s: prompt and
    output, including sampled tokens that the scheduler does not know yet."""
    params = [seq.request.params for seq in sequences]
    device = logits_SV.device

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(each, name) for each in params], dtype=dtype, device=device)

    counts_SV, prompt_SV = _counted(logits_SV.shape[1], sequences, tokens_ST, ends)
    draws = Draws(
        temperature_B=column("temperature"),
        min_p_B=column("min_p"),
        top_k_B=column("top_k", torch.int32),
        top_p_B=column("top_p"),
        seeds_B=torch.tensor(seeds, dtype=torch.int64, device=device),
        steps_B=torch.tensor(ends, dtype=torch.int64, device=device),
    )
    penalties = Penalties(
        repetition_B=column("repetition_penalty"),
        presence_B=column("presence_penalty"),
        frequency_B=column("frequency_penalty"),
        counts_SV=counts_SV,
        prompt_SV=prompt_SV,
    )
    return sample(_shifted(logits_SV, sequences, ends), draws, penalties, _allowed(logits_SV, sequences))


def _shifted(logits_SV: Tensor, sequences: Items[Sequence], ends: Items[int]) -> Tensor:
    """Logits with biases added, and end tokens forbidden while the output is too short."""
    for logits_V, seq, end in zip(logits_SV, sequences, ends, strict=True):
        params = seq.request.params
        for token, bias in params.logit_bias.items():
            logits_V[token] += bias
        if end - seq.num_prompt + 1 < params.min_tokens and seq.stops:
            logits_V[sorted(seq.stops)] = -torch.inf
    return logits_SV


def _counted(vocab: int, sequences: Items[Sequence], tokens_ST: Tensor, ends: Items[int]) -> tuple[Tensor, Tensor]:
    """Count of each output token, and whether it is in the prompt."""
    shape = (len(sequences), vocab)
    counts_SV = torch.zeros(shape, dtype=torch.int32, device=tokens_ST.device)
    prompt_SV = torch.zeros(shape, dtype=torch.bool, device=tokens_ST.device)
    for s, (seq, end) in enumerate(zip(sequences, ends, strict=True)):
        output = tokens_ST[s, seq.num_prompt : end]
        counts_SV[s].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        prompt_SV[s, tokens_ST[s, : seq.num_prompt]] = True
    return counts_SV, prompt_SV


def _allowed(logits_SV: Tensor, sequences: Items[Sequence]) -> Tensor | None:
    """Bit masks of allowed tokens; none without constraints."""
    if all(seq.constraint is None for seq in sequences):
        return None
    words = -(-logits_SV.shape[1] // 32)
    allowed_SW = torch.full((len(sequences), words), -1, dtype=torch.int32)
    for s, seq in enumerate(sequences):
        if seq.constraint is not None:
            bits = seq.constraint.allowed().ljust(4 * words, b"\0")[: 4 * words]
            allowed_SW[s] = torch.frombuffer(bytearray(bits), dtype=torch.int32)
    return allowed_SW.to(logits_SV.device)
