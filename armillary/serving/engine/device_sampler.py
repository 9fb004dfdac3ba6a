"""Drawing tokens on the device: a quick way that a CUDA graph holds, and one for every wish there is.

Both read wishes from the rows on the device and write the tokens where the next step finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.sampling import Draws, Penalties
from armillary.serving.engine.device_rows import DeviceRows
from armillary.serving.engine.engine_kernels import EngineKernels
from armillary.serving.engine.forward import Inputs
from armillary.serving.engine.step import Extra

# B sequences, V vocabulary, L tokens of the longest, W words of 32 tokens


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """Log-probabilities of chosen tokens and of the likeliest, on their way."""

    chosen_B: Tensor
    top_BN: Tensor
    ids_BN: Tensor


class DeviceSampler:
    """Rows and kernels, and how tokens come of logits."""

    def __init__(self, rows: DeviceRows, kernels: EngineKernels) -> None:
        self.rows, self.kernels = rows, kernels

    def quick(self, logits_BV: Tensor, inputs: Inputs) -> Tensor:
        """Tokens [B], int64: temperature, top-k, top-p, min-p, seeds."""
        found = inputs.found
        if found is not None:
            draws = self._draws(found.floats_FB, found.ints_IB, inputs, found.top_k_B)
        else:
            rows_B = inputs.long("rows_B")
            draws = self._draws(self.rows.floats_FR[:, rows_B], self.rows.ints_IR[:, rows_B], inputs)
        return self._keep(self.kernels.sample(logits_BV, draws), inputs)

    def full(
        self, logits_BV: Tensor, inputs: Inputs, extras: list[Extra], allowed_BW: Tensor | None
    ) -> tuple[Tensor, TopLogprobs | None]:
        """Tokens [B], with every wish; log-probabilities are those of the model, before any of them."""
        rows_B = inputs.long("rows_B")
        floats, ints = self.rows.floats_FR[:, rows_B], self.rows.ints_IR[:, rows_B]
        changed = _shifted(logits_BV, extras)
        penalties = None
        if any(extra.penalised for extra in extras):
            counts_BV, prompt_BV = self._counted(rows_B, ints[2], inputs.long("lengths_B"), logits_BV.shape[1])
            penalties = Penalties(repetition_B=floats[3], presence_B=floats[4], frequency_B=floats[5],
                                  counts_SV=counts_BV, prompt_SV=prompt_BV)  # fmt: skip
        tokens_B = self.kernels.sample(changed, self._draws(floats, ints, inputs), penalties, allowed_BW)
        wanted = [extra.num_top for extra in extras if extra.num_top is not None]
        told = self.told(logits_BV, tokens_B, max(wanted)) if wanted else None
        return self._keep(tokens_B, inputs), told

    def told(self, logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> TopLogprobs:
        chosen_B, top_BN, ids_BN = self.kernels.logprobs(logits_BV, tokens_B, max(1, num_top))
        return TopLogprobs(chosen_B=chosen_B, top_BN=top_BN, ids_BN=ids_BN)

    def _draws(self, floats: Tensor, ints: Tensor, inputs: Inputs, top_k_B: Tensor | None = None) -> Draws:
        top_k_B = ints[1].int() if top_k_B is None else top_k_B
        return Draws(temperature_B=floats[0], min_p_B=floats[1], top_p_B=floats[2], top_k_B=top_k_B,
                     seeds_B=ints[0], steps_B=inputs.long("lengths_B"))  # fmt: skip

    def _keep(self, tokens_B: Tensor, inputs: Inputs) -> Tensor:
        """Into the rows; what nobody drew goes to the null row."""
        if self.kernels.put is not None:
            rows_at, positions_at = (inputs.shape.parts()[name][0] for name in ("writes_B", "lengths_B"))
            self.kernels.put(tokens_B, inputs.wide, rows_at, positions_at, self.rows.tokens_RT)
            return tokens_B
        at = (inputs.long("writes_B"), inputs.long("lengths_B"))
        self.rows.tokens_RT.index_put_(at, tokens_B.clamp_min(0).int())
        return tokens_B

    def _counted(self, rows_B: Tensor, prompts_B: Tensor, ends_B: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """How often each token was put out, and whether it is in the prompt: counted anew, which no table can get
        wrong."""
        tokens_BL = self.rows.tokens_RT[rows_B].long()
        at_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        made_BL = (at_L >= prompts_B[:, None]) & (at_L < ends_B[:, None])
        counts_BV = tokens_BL.new_zeros(len(rows_B), vocab, dtype=torch.int32)
        counts_BV.scatter_add_(1, tokens_BL, made_BL.int())
        prompt_BV = torch.zeros_like(counts_BV).scatter_add_(1, tokens_BL, (at_L < prompts_B[:, None]).int())
        return counts_BV, prompt_BV > 0


def _shifted(logits_BV: Tensor, extras: list[Extra]) -> Tensor:
    """Biases added and end tokens ruled out, in one change each, of a copy in fp32."""
    biased = [(extra.at, token, bias) for extra in extras for token, bias in extra.bias]
    banned = [(extra.at, token) for extra in extras for token in extra.banned]
    if not biased and not banned:
        return logits_BV
    changed, device = logits_BV.float().clone(), logits_BV.device
    if biased:
        at, tokens, values = (torch.tensor(part, device=device) for part in zip(*biased, strict=True))
        changed.index_put_((at, tokens), values.float(), accumulate=True)
    if banned:
        at, tokens = (torch.tensor(part, device=device) for part in zip(*banned, strict=True))
        changed.index_put_((at, tokens), torch.tensor(-torch.inf, device=device))
    return changed
