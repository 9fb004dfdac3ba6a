"""Encodes a decision as a step: tokens, cache slots, and which rows sample how.

It keeps a copy of the block tables on the host, so that a step's slots are looked up before it is sent.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence
from armillary.engine.runner.pooled_prompts import pooled_chunks
from armillary.engine.runner.step_input import Admitted, Extra, Ints, PromptLogprobs, Shape, Step, null_step
from armillary.engine.scheduler.decision import Decision

Fit = Callable[[int, int, bool], tuple[int, int]]  # (tokens, sequences, decodes only) -> the same, padded


_NOTHING: Ints = np.empty((2, 0), dtype=np.int32)


def unpadded(tokens: int, rows: int, decodes: bool) -> tuple[int, int]:
    """No padding, for devices without CUDA graphs."""
    return tokens, rows


class Encoder:
    """Encodes decisions, in their order, as steps."""

    def __init__(
        self,
        *,
        max_running: int,
        max_model_len: int,
        block_tokens: int,
        groups: int,
        new_seed: Callable[[], int],
        fit: Fit = unpadded,
        long_rope: bool = False,
    ) -> None:
        self.max_running, self.max_model_len, self.size, self.groups = max_running, max_model_len, block_tokens, groups
        self.pages = -(-max_model_len // block_tokens)
        self.tables_GRP: Ints = np.zeros((groups, max_running + 1, self.pages), dtype=np.int32)
        self.fit = fit
        self._new_seed = new_seed
        self._long_rope = long_rope
        self.slot_of: Callable[[str], int] = _no_slot
        """slot of a LoRA adapter by its name"""
        self._special: set[int] = set()  # rows that need the full sampler
        self._adapted: set[int] = set()  # rows with an adapter
        self._last_decode: tuple[Shape, list[int], Ints, Ints] | None = None
        """of the last decode-only step: shape, rows (list and array), and its array"""

    def of_another_rank(self) -> "Encoder":
        """The same, with block tables of its own."""
        return Encoder(
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            block_tokens=self.size,
            groups=self.groups,
            new_seed=self._new_seed,
            fit=self.fit,
            long_rope=self._long_rope,
        )

    @property
    def pads(self) -> bool:
        """Whether steps are padded to the shapes of CUDA graphs."""
        return self.fit is not unpadded

    def common_shape(self, decisions: Items[Decision]) -> Shape:
        """One that holds the steps of several dp ranks."""
        decodes_only = not any(decision.chunks for decision in decisions)
        tokens = max(decision.num_tokens for decision in decisions)
        rows = max(len(decision.decodes) + len(decision.chunks) for decision in decisions)
        return Shape(*self.fit(tokens, rows, decodes_only), self.groups, decodes_only)

    def encode(self, decision: Decision, common: Shape | None = None) -> Step:
        """The step, in a shape that it has in `common` with others where given; padding uses the null row, one past the
        last."""
        table_updates = self._table_updates(decision)
        admitted = [self._admitted(seq) for seq in decision.admitted]
        shape, adapts = common or self.common_shape([decision]), self._adapts(decision)
        if decision.drafts or adapts:
            shape = replace(shape, drafts=bool(decision.drafts) and shape.decodes, adapters=adapts)
        copies = np.array(decision.copies, dtype=np.int32).reshape(-1, 2).T if decision.copies else _NOTHING
        quick = shape.decodes and not self._long_rope and not decision.empty
        ints = self._decodes(shape, decision) if quick else null_step(shape, self.max_running)
        step = Step(
            shape=shape,
            ints=ints,
            table_updates=table_updates,
            admitted=admitted,
            copies=copies,
            drafts=_drafts(decision) if decision.drafts else None,
            draws=bool(decision.sampling),
            is_empty=decision.empty,
        )
        if not quick and not decision.empty:
            self._fill(step, decision)
        step.extras = self._extras(decision)
        step.prompts = _prompt_logprobs(decision)
        step.pooled = [pooled for _, pooled in pooled_chunks(decision)]
        return step

    def _adapts(self, decision: Decision) -> bool:
        if not self._adapted:
            return False
        chunk_rows = [chunk.row for chunk in decision.chunks]
        return not (self._adapted.isdisjoint(decision.rows) and self._adapted.isdisjoint(chunk_rows))

    def _decodes(self, shape: Shape, decision: Decision) -> Ints:
        """Array of a decode-only step; where the rows are those of the step before, only positions and slots are
        new."""
        if self._last_decode is None or self._last_decode[0] != shape or self._last_decode[1] != decision.rows:
            self._last_decode = (
                shape,
                decision.rows,
                np.array(decision.rows, dtype=np.int32),
                _decoding(shape, decision.rows, self.max_running),
            )
        _, _, rows, ints = self._last_decode
        ints, parts, count = ints.copy(), shape.parts(), len(rows)
        positions = np.array(decision.positions, dtype=np.int32)
        block, place = np.divmod(positions, self.size)
        for name, values in (("positions_T", positions), ("angles_T", positions), ("lengths_B", positions + 1)):
            at = parts[name][0]
            ints[at : at + count] = values
        at, size = parts["slots_GT"]
        ints[at : at + size].reshape(self.groups, -1)[:, :count] = self.tables_GRP[:, rows, block] * self.size + place
        return ints

    def _fill(self, step: Step, decision: Decision) -> None:
        null, chunks, n = self.max_running, decision.chunks, len(decision.decodes)
        sizes = np.array([1] * n + [chunk.size for chunk in chunks], dtype=np.int32)
        begins = np.array(decision.positions + [chunk.start for chunk in chunks], dtype=np.int32)
        rows = np.array(decision.rows + [chunk.row for chunk in chunks], dtype=np.int32)
        upto, count = np.cumsum(sizes, dtype=np.int32), len(sizes)
        total = int(upto[-1])
        rows_T, positions_T = step.part("rows_T"), step.part("positions_T")
        rows_T[:] = null
        rows_T[:total] = np.repeat(rows, sizes)
        positions_T[:total] = np.arange(total, dtype=np.int32) + np.repeat(begins - (upto - sizes), sizes)
        step.part("angles_T")[:] = positions_T
        if self._long_rope:
            self._shift_long_rope(step, decision, sizes, total)
        slots_GT = step.part("slots_GT").reshape(self.groups, -1)
        slots_GT[:] = -1
        live, at = rows_T[:total], positions_T[:total]
        slots_GT[:, :total] = self.tables_GRP[:, live, at // self.size] * self.size + at % self.size
        step.part("rows_B")[:] = null
        step.part("rows_B")[:count] = rows
        step.part("writes_B")[:] = null
        step.part("writes_B")[:n] = rows[:n]
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        step.part("writes_B")[n:count] = np.where(samples, rows[n:], null)
        step.part("lasts_B")[:count] = upto - 1
        step.part("lengths_B")[:count] = begins + sizes
        starts = step.part("starts")
        starts[1 : count + 1] = upto
        starts[count + 1 :] = total

    def _shift_long_rope(self, step: Step, decision: Decision, sizes: Ints, total: int) -> None:
        """Long-context RoPE positions are in the second half of the RoPE tables."""
        sequences = [*decision.decodes, *(chunk.sequence for chunk in decision.chunks)]
        long_rope: Ints = np.array([seq.long_rope for seq in sequences], dtype=np.int32)
        step.part("angles_T")[:total] += np.repeat(long_rope, sizes) * self.max_model_len

    def _table_updates(self, decision: Decision) -> Ints:
        if not decision.table_updates:
            return _NOTHING
        places: list[int] = []
        values: list[int] = []
        for row, group, first, blocks in decision.table_updates:
            self.tables_GRP[group, row, first : first + len(blocks)] = blocks
            base = (group * (self.max_running + 1) + row) * self.pages + first
            places.extend(range(base, base + len(blocks)))
            values.extend(blocks)
        latest = dict(zip(places, values, strict=True))  # of several updates of an entry the last counts
        return np.array([list(latest), list(latest.values())], dtype=np.int32)

    def _admitted(self, seq: Sequence) -> Admitted:
        params = seq.request.params
        (self._special.discard if _is_ordinary(seq, params) else self._special.add)(seq.row)
        adapter = seq.request.adapter
        (self._adapted.add if adapter else self._adapted.discard)(seq.row)
        seed = (self._new_seed() if params.seed is None else params.seed) + seq.index
        return Admitted(
            row=seq.row,
            tokens=_token_bytes(seq),
            ints=(seed, params.top_k, seq.num_prompt),
            adapter=self.slot_of(adapter) if adapter else -1,
            floats=(
                params.temperature,
                params.min_p,
                params.top_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ),
        )

    def _extras(self, decision: Decision) -> list[Extra]:
        special = self._special
        if not special:
            return []
        extras = [
            _extra(i, seq, position + 1)
            for i, (seq, row, position) in enumerate(
                zip(decision.decodes, decision.rows, decision.positions, strict=True)
            )
            if row in special
        ]
        first = len(decision.decodes)
        return extras + [
            _extra(first + i, chunk.sequence, chunk.start + chunk.size)
            for i, chunk in enumerate(decision.chunks)
            if chunk.samples and chunk.row in special
        ]


def _no_slot(name: str) -> int:
    raise AssertionError(f"adapter '{name}' on an engine that has none")


def _drafts(decision: Decision) -> Ints:
    """Rows, positions and tokens of the draft tokens; the draft model has yet to propose those of -1."""
    columns = [
        (draft.row, draft.start + i, draft.tokens[i] if draft.tokens else -1)
        for draft in decision.drafts
        for i in range(draft.count)
    ]
    return np.array(columns, dtype=np.int32).T


def _decoding(shape: Shape, rows: list[int], null: int) -> Ints:
    """The part of the array that is constant while the same rows decode."""
    ints: Ints = np.zeros(shape.size, dtype=np.int32)
    parts, count = shape.parts(), len(rows)
    for name in ("rows_T", "rows_B", "writes_B"):
        at, size = parts[name]
        ints[at : at + size] = null
        ints[at : at + count] = rows
    at, size = parts["slots_GT"]
    ints[at : at + size] = -1
    at = parts["lasts_B"][0]
    ints[at : at + count] = np.arange(count)
    at, size = parts["starts"]
    ints[at : at + size] = np.minimum(np.arange(size), count)
    return ints


def _is_ordinary(seq: Sequence, params: SamplingParams) -> bool:
    """Only temperature, top-k, top-p, min-p and a seed."""
    return not (
        params.is_penalised or params.logit_bias or params.min_tokens or params.logprobs is not None or seq.constraint
    )


def _extra(at: int, seq: Sequence, end: int) -> Extra:
    params = seq.request.params
    short = end - seq.num_prompt + 1 < params.min_tokens
    return Extra(
        at=at,
        bias=tuple(params.logit_bias.items()),
        banned=tuple(sorted(seq.stops)) if short else (),
        penalised=params.is_penalised,
        num_top=params.logprobs,
        masked=seq.constraint is not None,
    )


def _prompt_logprobs(decision: Decision) -> list[PromptLogprobs]:
    """Chunks whose sequences want log-probabilities of prompt tokens."""
    wanted_logprobs, at = [], len(decision.decodes)
    for chunk in decision.chunks:
        seq, wanted = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
        end = min(chunk.start + chunk.size, seq.num_prompt - 1)
        if wanted is not None and end > chunk.start:
            targets = tuple(seq.tokens[chunk.start + 1 : end + 1])
            wanted_logprobs.append(PromptLogprobs(first=at, size=end - chunk.start, targets=targets, num_top=wanted))
        at += chunk.size
    return wanted_logprobs


def _token_bytes(seq: Sequence) -> bytes:
    """Known tokens; those of full blocks exist as bytes already, which matters for long prompts."""
    data = b"".join(seq.chain.chunks)
    return data + array("i", seq.tokens[len(data) // 4 :]).tobytes()
