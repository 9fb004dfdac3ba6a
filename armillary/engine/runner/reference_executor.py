"""The reference executor: the model, eager, over paged KV blocks, with the reference kernels and the reference sampler.

Faster executors must give the same tokens. It executes a decision in the documented order.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.layer_groups import state_places
from armillary.engine.request.sequence import Sequence
from armillary.engine.runner.device_state import block_shape, with_heads
from armillary.engine.runner.host_blocks import HostBlocks
from armillary.engine.runner.recurrent_states import RecurrentStates, make_states
from armillary.engine.scheduler.decision import Decision
from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.delta.gated_delta import DeltaHeads, DeltaState, gated_delta
from armillary.kernels.latent.latent_decode import latent_decode
from armillary.kernels.paged.paged_attention import PagedBatch, paged_attention
from armillary.kernels.sampling.sampling import Draws, Penalties, sample_rows
from armillary.kernels.simplicial.paged import paged_simplicial
from armillary.model.layers.attention_forms import Attend, OverLatents, Recur, WithState
from armillary.model.transformer import Transformer

# T packed tokens, S sequences of the step, G groups of layers, P blocks of the longest sequence


class PlainExecutor:
    """Rows of tokens and block tables, and the blocks themselves."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_running: int,
        max_model_len: int,
        new_seed: Callable[[], int] = lambda: 0,
    ) -> None:
        weight = next(model.parameters())
        config, self.size = model.config, cache.block_tokens
        self.model, self.device = model, weight.device
        self._place = {
            layer: (g, slot) for g, group in enumerate(cache.groups) for slot, layer in enumerate(group.layers)
        }
        self._states, self._place = (
            make_states(config, max_running=max_running, weight=weight),
            (self._place | state_places(config)),
        )
        assert sorted(self._place) == list(range(config.num_layers)), "the cache was planned for another model"
        slots = max(len(group.layers) for group in cache.groups)
        shape = (slots, cache.pool.num_blocks, *block_shape(config, self.size))
        self.blocks = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        """for each layer of a group: [block, *block_shape]"""
        self.host = None if cache.offload is None else HostBlocks(cache.offload.num_blocks, self.blocks)
        longest = -(-max_model_len // self.size)
        self.tables_GRP = torch.zeros(len(cache.groups), max_running, longest, dtype=torch.int32, device=self.device)
        self.tokens_RT = torch.zeros(max_running, max_model_len + 1, dtype=torch.int64, device=self.device)
        """of each row: its tokens so far, those drawn included"""
        self._seeds = [0] * max_running
        self._new_seed = new_seed

    def launch(self, decision: Decision) -> Tensor:
        """Run a step; the tokens drawn for `decision.sampling`."""
        with torch.inference_mode():
            self._prepare(decision)
            return self._compute(decision)

    def _compute(self, decision: Decision) -> Tensor:
        spans = [(row, at, 1) for row, at in zip(decision.rows, decision.positions, strict=True)]
        spans += [(chunk.row, chunk.start, chunk.size) for chunk in decision.chunks]
        hidden_TH = self._forward(spans)
        drawing = list(range(len(decision.decodes)))
        drawing += [len(decision.decodes) + i for i, chunk in enumerate(decision.chunks) if chunk.samples]
        if not drawing:
            return torch.empty(0, dtype=torch.int64)
        lasts = torch.tensor([size for _, _, size in spans], device=self.device).cumsum(0) - 1
        logits_SV = self.model.head(hidden_TH[lasts[drawing]]).float()
        rows, ends = [spans[i][0] for i in drawing], [spans[i][1] + spans[i][2] for i in drawing]
        tokens = draw(logits_SV, decision.sampling, [self._seeds[row] for row in rows], self.tokens_RT[rows], ends)
        self.tokens_RT[rows, ends] = tokens.clamp_min(0)
        return tokens

    def tokens(self, launched: Tensor) -> list[int]:
        return launched.tolist()  # type: ignore[no-any-return]

    def _prepare(self, decision: Decision) -> None:
        for seq in decision.admitted:
            self.tokens_RT[seq.row, : len(seq.tokens)] = torch.tensor(seq.tokens, device=self.device)
            seed = seq.request.params.seed
            self._seeds[seq.row] = (self._new_seed() if seed is None else seed) + seq.index
        for row, group, first, blocks in decision.table_updates:
            changed = torch.tensor(blocks, dtype=torch.int32, device=self.device)
            self.tables_GRP[group, row, first : first + len(blocks)] = changed
        for draft in decision.drafts:
            upto = draft.start + draft.count
            self.tokens_RT[draft.row, draft.start : upto] = torch.tensor(draft.tokens, device=self.device)
        if decision.copies and self.host is not None:
            self.host.copy(self.blocks, np.array(decision.copies, dtype=np.int32).T.copy())
        elif decision.copies:
            sources, targets = zip(*decision.copies, strict=True)
            self.blocks[:, list(targets)] = self.blocks[:, list(sources)]

    def _forward(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """Hidden [T, H] of all tokens of the step, packed in the order of `spans`: (row, start, size)."""
        device = self.device
        rows_T = torch.tensor([row for row, _, size in spans for _ in range(size)], device=device)
        positions_T = torch.tensor([start + i for _, start, size in spans for i in range(size)], device=device)
        tokens_T = self.tokens_RT[rows_T, positions_T]
        return self.model(tokens_T[None], positions_T[None], self._attend(spans, rows_T, positions_T))[0]

    def _attend(self, spans: list[tuple[int, int, int]], rows_T: Tensor, positions_T: Tensor) -> Attend:
        sizes = torch.tensor([0, *(size for _, _, size in spans)], dtype=torch.int32, device=self.device)
        starts, longest = sizes.cumsum(0, dtype=torch.int32), int(sizes.max())
        lengths_S = torch.tensor([start + size for _, start, size in spans], dtype=torch.int32, device=self.device)
        batches = [
            PagedBatch(tables_BP=tables_SP, starts=starts, lengths_B=lengths_S, max_query=longest)
            for tables_SP in self.tables_GRP[:, [row for row, _, _ in spans]]
        ]
        pages_GT = self.tables_GRP[:, rows_T, positions_T // self.size].long()
        places_T = positions_T % self.size

        def latent(layer: int, q_1TNL: Tensor, k_1T1L: Tensor, v_1T1C: Tensor, options: AttentionOptions) -> Tensor:
            group, slot = self._place[layer]
            blocks = self.blocks[slot]
            blocks[pages_GT[group], places_T] = k_1T1L[0, :, 0].to(blocks.dtype)
            rank, scale = v_1T1C.shape[-1], options.scale_for(q_1TNL.shape[-1])
            return latent_decode(q_1TNL[0, ..., :rank], q_1TNL[0, ..., rank:], blocks, batches[group], scale)[None]

        def attend(layer: int, q_1TND: Tensor, k_1TKD: Tensor, v_1TKD: Tensor, options: AttentionOptions) -> Tensor:
            group, slot = self._place[layer]
            blocks = with_heads(self.blocks[slot], k_1TKD.shape[2])
            for index, x_1TKD in enumerate((k_1TKD, v_1TKD)):
                blocks[:, index].transpose(1, 2)[pages_GT[group], places_T] = x_1TKD[0].to(blocks.dtype)
            run = paged_simplicial if options.pair_windows[0] else paged_attention
            return run(q_1TND[0], blocks, batches[group], options)[None]

        if self._states is not None:
            return WithState(attend, self._recur(self._states, spans))
        return attend if self.model.config.mla is None else OverLatents(latent)

    def _recur(self, states: RecurrentStates, spans: list[tuple[int, int, int]]) -> Recur:
        """Sequence by sequence, token by token."""

        def recur(
            layer: int, qkv_1TC: Tensor, decay_1TV: Tensor, beta_1TV: Tensor, conv_CW: Tensor, heads: DeltaHeads
        ) -> Tensor:
            of_rows, outs, at = states.of_layer(self._place[layer][1]), [], 0
            for row, start, size in spans:
                state = DeltaState(of_rows.inputs_RSC[row : row + 1], of_rows.matrices_RVDE[row : row + 1])
                for token in range(at, at + size):
                    span = slice(token, token + 1)
                    begins = start == 0 and token == at
                    out, state = gated_delta(
                        qkv_1TC[:, span],
                        decay_1TV[:, span],
                        beta_1TV[:, span],
                        conv_CW,
                        heads,
                        state=None if begins else state,
                    )
                    outs.append(out)
                of_rows.inputs_RSC[row], of_rows.matrices_RVDE[row] = state.inputs_BSC[0], state.matrix_BVDE[0]
                at += size
            return torch.cat(outs, dim=1)

        return recur


# S sequences, V vocabulary, W words of 32 tokens


def draw(
    logits_SV: Tensor, sequences: Items[Sequence], seeds: Items[int], tokens_ST: Tensor, ends: Items[int]
) -> Tensor:
    """Each sequence sampled by its own parameters and seed: token ids [S]; -1 where logits are not finite. `tokens_ST`
    holds the ends[s] tokens of sequence s: prompt and output, including sampled tokens that the scheduler does not know
    yet."""
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
    return sample_rows(_shifted(logits_SV, sequences, ends), draws, penalties, _allowed(logits_SV, sequences))


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
