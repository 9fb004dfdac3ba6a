"""A small model that proposes draft tokens, on the target's rows and block tables with KV blocks of its own.

Position by position it decodes like any model, and its tokens go where the next pass, and then the target, read them.
It samples with each request's own parameters, seed and position: the random number of a position is the same for both
models, so they agree as often as their distributions allow. Tokens that it has not computed yet, like a prompt's, come
in the first pass.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import torch

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.layer_groups import Group as LayerGroup
from armillary.engine.runner.device_state import block_shape
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_input import Ints, Shape, Step
from armillary.engine.scheduler.decision import Decision, PrefillChunk
from armillary.engine.speculative.draft import Draft
from armillary.errors import BadInput
from armillary.model.transformer import Transformer
from armillary.parallel.collectives import Group, all_reduce


class DraftModel:
    """Runs the passes of a step's drafts."""

    lag = 0
    """positions that a pass stays behind the token it reads: 1 for a head on the model's hidden states"""

    def __init__(
        self,
        target: FastExecutor,
        model: Transformer,
        *,
        block_tokens: int,
        graphs: bool | None,
        group: Group | None = None,
    ) -> None:
        """`group`: the ranks that each run it, where there are several."""
        _check(target, model)
        config, weight = model.config, next(model.parameters())
        cache = KVCache(2, block_tokens, groups=(LayerGroup(layers=tuple(range(config.num_layers))),), prefix=False)
        blocks = (config.num_layers, 2, *block_shape(config, block_tokens))
        self.executor = self.make_executor(
            model,
            cache,
            max_running=target.max_running,
            max_model_len=min(config.context, target.encoder.max_model_len),
            max_tokens=target.max_tokens,
            graphs=graphs,
            rows=target.rows.with_blocks(blocks, weight.dtype),
        )
        self.group, self.target_rows = group, target.rows
        self.max_len = self.executor.encoder.max_model_len
        self.executor.encoder.tables_GRP = target.encoder.tables_GRP[:1]
        block = self.executor.rows.blocks[:, :1]
        self.block_bytes = block.numel() * block.element_size()

    def make_executor(self, *given: Any, **options: Any) -> FastExecutor:
        return FastExecutor(*given, **options)

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """As many KV blocks as the target has."""
        self.executor.rows.allocate(num_blocks, host_blocks)

    def take(self, step: Step) -> None:
        """Copy the blocks that the target copies."""
        if step.copies.size:
            self.copy_blocks(step.copies)

    def copy_blocks(self, copies: Ints) -> None:
        self.executor.rows.copy_blocks(copies)

    def encode(self, drafts: Items[Draft]) -> list[tuple[Shape, Ints]]:
        """The passes that propose `drafts`."""
        return [self.encoded(decision) for decision in passes(drafts, self.executor.max_tokens, self.lag)]

    def encoded(self, decision: Decision) -> tuple[Shape, Ints]:
        step = self.executor.encoder.encode(decision)
        return step.shape, step.ints

    def propose(self, step: Step) -> None:
        """Run the passes of a step: its draft tokens are then in their rows. Several ranks run the same passes and take
        the first one's tokens, since their kernels may differ."""
        for shape, ints in step.passes:
            self.executor.steps.run(shape, True, ints)
        if self.group is not None:
            rows, positions, _ = self.target_rows.send(step.drafts).long().unbind()  # type: ignore[arg-type]
            tokens = self.target_rows.tokens_RT[rows, positions]
            shared = all_reduce(tokens if self.group.rank == 0 else torch.zeros_like(tokens), self.group)
            self.target_rows.tokens_RT[rows, positions] = shared

    def run(self, decision: Decision) -> None:
        """One pass, to time it."""
        with torch.inference_mode():
            shape, ints = self.encoded(decision)
            self.executor.steps.run(shape, True, ints)


def passes(drafts: Items[Draft], most: int, lag: int = 0) -> Iterator[Decision]:
    """The decode and prefill steps that propose `drafts`, with at most so many tokens each."""
    yield from _first_passes(drafts, most, lag)
    for depth in range(1, max(draft.count for draft in drafts)):
        decision = Decision(0)
        for draft in drafts:
            if draft.count > depth:
                _decode(decision, draft, draft.start - lag + depth - 1)
        yield decision


def _first_passes(drafts: Items[Draft], most: int, lag: int) -> Iterator[Decision]:
    """Up to each sequence's last token, after which the first draft token is sampled."""
    decision, left = Decision(0), most
    for draft in drafts:
        start = draft.start - lag
        at = min(draft.computed, start - 1)
        while at < start:
            size = min(left, start - at)
            ends = at + size == start
            if size == 1 and ends:
                _decode(decision, draft, at)
            else:
                decision.chunks.append(PrefillChunk(draft.sequence, draft.row, at, size, ends))
            at, left = at + size, left - size
            if not left:
                yield _closed(decision)
                decision, left = Decision(0), most
    if not decision.empty:
        yield _closed(decision)


def _decode(decision: Decision, draft: Draft, position: int) -> None:
    decision.decodes.append(draft.sequence)
    decision.positions.append(position)
    decision.rows.append(draft.row)


def _closed(decision: Decision) -> Decision:
    decision.sampling = decision.decodes + [chunk.sequence for chunk in decision.chunks if chunk.samples]
    return decision


def _check(target: FastExecutor, model: Transformer) -> None:
    config, own = target.forward.model.config, model.config
    if own.vocab != config.vocab:
        raise BadInput(
            f"the draft model {own.name} has {own.vocab:,} tokens and {config.name} {config.vocab:,}; take one with "
            "the same tokenizer, or serve.speculate=ngram"
        )
    if own.num_recurrent_layers:
        raise BadInput(f"the draft model {own.name} has recurrent states, which do not draft yet; take another")
    if not any(layer.attention == "full" for layer in config.layers):
        raise BadInput(
            f"{config.name} keeps no whole context that a draft model could share; take serve.speculate=ngram"
        )
