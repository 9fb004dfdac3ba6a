"""Sampling on the device: a fast path inside the CUDA graph, and a full path for rows that need more.

Both read sampling parameters from the rows on the device and write the tokens where the next step reads them. In a step
with both kinds of rows each takes its own path: what one request needs costs the others a few launches.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.engine.runner.device_state import DeviceRows
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.step_input import Extra, Inputs, Ints, Step
from armillary.kernels.sampling.sampling import Draws, Penalties

# B sequences of a step, S those of them whose logits are changed, P those with penalties, V vocabulary, L tokens of the
# longest of them, W words of 32 tokens, N likeliest tokens

Masks = dict[int, bytes]  # index among the sequences of a step -> bit mask of allowed tokens


@dataclass(frozen=True, kw_only=True)
class _Subset:
    """Some of a step's sequences."""

    at_S: Tensor
    rows_S: Tensor
    floats_FS: Tensor
    ints_IS: Tensor
    lengths_S: Tensor

    def draws(self) -> Draws:
        return _draws(self.floats_FS, self.ints_IS, self.lengths_S)


class DeviceSampler:
    """Samples tokens from logits."""

    def __init__(self, rows: DeviceRows, kernels: EngineKernels) -> None:
        self.rows, self.kernels = rows, kernels
        self.ahead = 0  # places by which a token's random number is further than its place in the rows

    def quick(self, logits_BV: Tensor, inputs: Inputs) -> Tensor:
        """Tokens [B], int64: temperature, top-k, top-p, min-p, seeds."""
        gathered_inputs, steps_B = inputs.decode_inputs, inputs.long("lengths_B")
        steps_B = steps_B + self.ahead if self.ahead else steps_B
        if gathered_inputs is not None:
            draws = _draws(gathered_inputs.floats_FB, gathered_inputs.ints_IB, steps_B, gathered_inputs.top_k_B)
        else:
            rows_B = inputs.long("rows_B")
            draws = _draws(self.rows.floats_FR[:, rows_B], self.rows.ints_IR[:, rows_B], steps_B)
        return self.store(self.kernels.sample(logits_BV, draws), inputs)

    def full(self, logits_BV: Tensor, inputs: Inputs, step: Step, masks: Masks) -> tuple[Tensor, Tensor | None]:
        """Tokens [B], each row by its own path, and `logprobs` of the rows that want them: those of the model, before
        any change."""
        changed = [extra for extra in step.extras if extra.changes]
        tokens_B = torch.zeros(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
        unchanged = np.setdiff1d(np.arange(len(logits_BV)), [extra.at for extra in changed])
        if len(unchanged):
            plain = self._subset(unchanged, inputs)
            rest_SV = logits_BV if not changed else logits_BV[plain.at_S]
            tokens_B[plain.at_S] = self.kernels.sample(rest_SV, plain.draws())
        if changed:
            subset = self._subset(np.array([extra.at for extra in changed]), inputs)
            tokens_B[subset.at_S] = self._changed(logits_BV[subset.at_S], subset, changed, step, masks)
        wanted = [extra for extra in step.extras if extra.num_top is not None]
        logprobs = None
        if wanted:
            at_S = self.rows.send(np.array([extra.at for extra in wanted]))
            logprobs = self.logprobs(logits_BV[at_S], tokens_B[at_S], max(extra.num_top or 0 for extra in wanted))
        return self.store(tokens_B, inputs), logprobs

    def _subset(self, places: Any, inputs: Inputs) -> _Subset:
        at_S = self.rows.send(places)
        rows_S = inputs.long("rows_B")[at_S]
        return _Subset(
            at_S=at_S,
            rows_S=rows_S,
            floats_FS=self.rows.floats_FR[:, rows_S],
            ints_IS=self.rows.ints_IR[:, rows_S],
            lengths_S=inputs.long("lengths_B")[at_S],
        )

    def _changed(self, logits_SV: Tensor, subset: _Subset, extras: list[Extra], step: Step, masks: Masks) -> Tensor:
        """Tokens of rows with penalties, biases, forbidden end tokens, or a constraint."""
        logits_SV = _shifted(logits_SV.float(), extras)
        penalised = [i for i, extra in enumerate(extras) if extra.penalised]
        penalties = None
        if penalised:
            longest = int(max(step.part("lengths_B")[extras[i].at] for i in penalised))
            penalties = self._penalties(subset, np.array(penalised), longest, logits_SV.shape[1])
        allowed_SW = self._allowed([extra.at for extra in extras], masks, logits_SV.shape[1])
        return self.kernels.sample(logits_SV, subset.draws(), penalties, allowed_SW)  # type: ignore[no-any-return]

    def _penalties(self, subset: _Subset, places: Any, longest: int, vocab: int) -> Penalties:
        """Tokens are counted anew in each step. Rows without penalties share the first row of the tables, which is
        empty."""
        at_P, count = self.rows.send(places), len(subset.rows_S)
        counts_PV, prompt_PV = self._counted(
            subset.rows_S[at_P], subset.ints_IS[2][at_P], subset.lengths_S[at_P], longest, vocab
        )
        places_S: Ints = np.zeros(count, dtype=np.int64)
        places_S[places] = np.arange(1, len(places) + 1)
        return Penalties(
            repetition_B=subset.floats_FS[3],
            presence_B=subset.floats_FS[4],
            frequency_B=subset.floats_FS[5],
            counts_SV=counts_PV,
            prompt_SV=prompt_PV,
            rows_B=self.rows.send(places_S),
        )

    def _counted(
        self, rows_P: Tensor, prompts_P: Tensor, ends_P: Tensor, longest: int, vocab: int
    ) -> tuple[Tensor, Tensor]:
        """Count of each output token, and whether it is in the prompt [1 + P, V]; the first row is empty."""
        tokens_PL = self.rows.tokens_RT[rows_P, :longest].long()
        at_L = torch.arange(longest, device=tokens_PL.device)
        made_PL = (at_L >= prompts_P[:, None]) & (at_L < ends_P[:, None])
        counts = torch.zeros(len(rows_P) + 1, vocab, dtype=torch.int32, device=tokens_PL.device)
        counts[1:].scatter_add_(1, tokens_PL, made_PL.int())
        prompt = torch.zeros(len(rows_P) + 1, vocab + 1, dtype=torch.bool, device=tokens_PL.device)
        prompt[1:].scatter_(1, torch.where(at_L < prompts_P[:, None], tokens_PL, vocab), True)
        return counts, prompt[:, :vocab].contiguous()

    def _allowed(self, places: list[int], masks: Masks, vocab: int) -> Tensor | None:
        """Bit masks of allowed tokens [S, W]; none without constraints."""
        if not masks:
            return None
        words = -(-vocab // 32)
        bits_SW: Ints = np.full((len(places), words), -1, dtype=np.int32)
        for i, at in enumerate(places):
            if at in masks:
                bits_SW[i] = np.frombuffer(masks[at].ljust(4 * words, b"\0")[: 4 * words], dtype=np.int32)
        return self.rows.send(bits_SW)

    def logprobs(self, logits_SV: Tensor, tokens_S: Tensor, num_top: int) -> Tensor:
        """[S, 1 + 2N] in fp64: log-probability of each token, those of the likeliest, and their ids, in one tensor, so
        that one copy brings it to the host."""
        chosen_S, top_SN, ids_SN = self.kernels.logprobs(logits_SV, tokens_S, max(1, num_top))
        return torch.cat([part.double() for part in (chosen_S[:, None], top_SN, ids_SN)], dim=1)

    def store(self, tokens_B: Tensor, inputs: Inputs) -> Tensor:
        """Write tokens into their rows; unsampled ones go to the null row."""
        if self.kernels.put is not None:
            rows_at, positions_at = (inputs.shape.parts()[name][0] for name in ("writes_B", "lengths_B"))
            self.kernels.put(tokens_B, inputs.wide, rows_at, positions_at, self.rows.tokens_RT)
        else:
            at = (inputs.long("writes_B"), inputs.long("lengths_B"))
            self.rows.tokens_RT.index_put_(at, tokens_B.clamp_min(0).int())
        return tokens_B


def _draws(floats: Tensor, ints: Tensor, steps_B: Tensor, top_k_B: Tensor | None = None) -> Draws:
    return Draws(
        temperature_B=floats[0],
        min_p_B=floats[1],
        top_p_B=floats[2],
        top_k_B=ints[1].int() if top_k_B is None else top_k_B,
        seeds_B=ints[0],
        steps_B=steps_B,
    )


def _shifted(logits_SV: Tensor, extras: list[Extra]) -> Tensor:
    """Logits with biases added and forbidden end tokens masked."""
    biased = [(i, token, bias) for i, extra in enumerate(extras) for token, bias in extra.bias]
    banned = [(i, token) for i, extra in enumerate(extras) for token in extra.banned]
    device = logits_SV.device
    if biased:
        at, tokens, values = (torch.tensor(part, device=device) for part in zip(*biased, strict=True))
        logits_SV = logits_SV.index_put((at, tokens), values.float(), accumulate=True)
    if banned:
        at, tokens = (torch.tensor(part, device=device) for part in zip(*banned, strict=True))
        logits_SV = logits_SV.index_put((at, tokens), torch.tensor(-torch.inf, device=device))
    return logits_SV
