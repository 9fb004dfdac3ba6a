"""The executor: a decision becomes one array, one copy to the device and one CUDA graph, and nothing waits.

Tokens come back by an asynchronous copy that `tokens` waits for, so the host decides the next step meanwhile. On a CPU
the same code runs without graphs and without padding. `PlainExecutor` is its slow twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.model.transformer import Transformer
from armillary.serving.engine.decision import Decision
from armillary.serving.engine.device_rows import DeviceRows
from armillary.serving.engine.device_sampler import DeviceSampler, TopLogprobs
from armillary.serving.engine.encode import Encoder
from armillary.serving.engine.engine_kernels import EngineKernels, pick_kernels
from armillary.serving.engine.forward import Forward, gathered, inputs_of
from armillary.serving.engine.graphs import GraphSteps, Steps
from armillary.serving.engine.kv_cache import KVCache
from armillary.serving.engine.logprob import Logprob
from armillary.serving.engine.loop import StepTooLarge
from armillary.serving.engine.out_of_memory import first_line, is_out_of_memory
from armillary.serving.engine.sequence import Sequence
from armillary.serving.engine.settings import rope_switch
from armillary.serving.engine.step import Ints, Shape, Step

# T tokens, B sequences, V vocabulary, W words of 32 tokens

Masks = dict[int, bytes]
"""place among the sequences of a step -> bits of the tokens it may get"""
_HEAD_TOKENS = 256
"""prompt tokens whose logits are held at once"""


@dataclass(kw_only=True)
class Launched:
    """A step under way."""

    decision: Decision
    tokens_B: Tensor | None
    """on the host once `done`"""
    done: torch.cuda.Event | None
    told: TopLogprobs | None
    prompts: list[TopLogprobs]
    step: Step


class FastExecutor:
    """Encoder, rows on the device, the model, the sampler, and graphs of them."""

    def __init__(
        self, model: Transformer, cache: KVCache, *, max_running: int, max_model_len: int, max_tokens: int = 2048,
        new_seed: Callable[[], int] = lambda: 0, kernels: EngineKernels | None = None, graphs: bool | None = None,
        kv_dtype: torch.dtype | None = None, kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        weight, config = next(model.parameters()), model.config
        self.device, self.vocab = weight.device, config.vocab
        self.max_running, self.max_tokens = max_running, max_tokens
        self.kernels = kernels or pick_kernels(config, dtype=weight.dtype, device=self.device, batch=max_running)
        pages, slots = -(-max_model_len // cache.block_tokens), max(len(group.layers) for group in cache.groups)
        blocks = (slots, cache.pool.num_blocks, 2, kv_heads or config.kv_heads, cache.block_tokens, config.head_dim)
        self.rows = DeviceRows(
            max_running=max_running, max_model_len=max_model_len, pages=pages, groups=len(cache.groups), blocks=blocks,
            dtype=kv_dtype or weight.dtype, device=self.device,
        )  # fmt: skip
        with torch.inference_mode():
            self.forward = Forward(model, self.rows, cache.groups, self.kernels, max_model_len=max_model_len)
        self.sampler = DeviceSampler(self.rows, self.kernels)
        self.steps = self._steps(graphs, max_running, max_tokens)
        self.encoder = Encoder(
            max_running=max_running, max_model_len=max_model_len, block_tokens=cache.block_tokens,
            groups=len(cache.groups), new_seed=new_seed, fit=self.steps.fit, far=rope_switch(config) is not None,
        )  # fmt: skip

    def _steps(self, graphs: bool | None, max_running: int, max_tokens: int) -> Steps:
        if self.device.type != "cuda" or graphs is False or not self.kernels.capturable:
            return Steps(self._compute, self.rows.send)
        return GraphSteps(self._compute, self.rows.send, max_running=max_running, max_tokens=max_tokens,
                          device=self.device, null=lambda shape: null_step(shape, max_running))  # fmt: skip

    def warm(self) -> int:
        """Capture what there is to capture before the first request; how many graphs that is."""
        with torch.inference_mode():
            return self.steps.warm(self.encoder.groups)

    def run_largest(self) -> None:
        """The largest step there can be, of padding alone: it takes the memory that steps take."""
        shape = Shape(*self.encoder.fit(self.max_tokens, self.max_running, False), self.encoder.groups, False)
        with torch.inference_mode():
            self._compute(shape, True, self.rows.send(null_step(shape, self.max_running)))

    def graph_bytes(self) -> int:
        """Memory that graphs will take, by two that are captured and let go of."""
        with torch.inference_mode():
            return self.steps.trial(self.encoder.groups)

    def launch(self, decision: Decision) -> Launched:
        """Begin a step. Where an allocation fails, cached memory is given back first, and `StepTooLarge` says so: what
        was launched of the step wrote nothing that a smaller one does not write again."""
        try:
            with torch.inference_mode():
                return self.run(self.encoder.encode(decision), decision)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = first_line(error)
        if self.device.type == "cuda":  # only now that the error is gone, whose frames hold the step's tensors
            torch.cuda.empty_cache()
        raise StepTooLarge(f"there was no memory for this request alone ({said}); lower serve.memory_fraction, shorten "
                           "its prompt, or ask for no log-probabilities or penalties")  # fmt: skip

    def run(self, step: Step, decision: Decision, masks: Masks | None = None) -> Launched:
        """A step that is encoded already; `masks` where another rank has asked the structures."""
        self.rows.take(step)
        told: TopLogprobs | None = None
        prompts: list[TopLogprobs] = []
        if step.prompts:
            tokens_B, told, prompts = self._with_prompts(step, decision, masks)
        else:
            quick = step.draws and not step.extras
            result = self.steps.run(step.shape, quick, step.ints)
            tokens_B = result if quick else None
            if step.draws and not quick:
                tokens_B, told = self._drawn(result, step, decision, masks)
        return self._sent(Launched(decision=decision, tokens_B=tokens_B if step.draws else None, done=None, told=told,
                                   prompts=prompts, step=step))  # fmt: skip

    def _compute(self, shape: Shape, quick: bool, packed: Tensor) -> Tensor:
        """Tokens [B] where they are drawn the quick way, else logits [B, V]."""
        inputs = self.forward.inputs(shape, packed)
        logits_BV = self.forward.logits(self.forward.last(inputs))
        return self.sampler.quick(logits_BV, inputs) if quick else logits_BV

    def _drawn(
        self, logits_BV: Tensor, step: Step, decision: Decision, masks: Masks | None
    ) -> tuple[Tensor, TopLogprobs | None]:
        """The slow way: what structures allow is asked for while the device still computes the logits."""
        inputs = inputs_of(step.shape, self.rows.send(step.ints))
        return self.sampler.full(logits_BV, inputs, step.extras, self._allowed(step, decision, masks))

    def _with_prompts(
        self, step: Step, decision: Decision, masks: Masks | None
    ) -> tuple[Tensor | None, Any, list[TopLogprobs]]:
        """Logits of prompt tokens are wanted too, a few at a time."""
        inputs = inputs_of(step.shape, self.rows.send(step.ints))
        hidden_TH = self.forward.hidden(inputs)
        prompts = []
        for wanted in step.prompts:
            targets = torch.tensor(wanted.targets, device=self.device)
            pieces = hidden_TH[wanted.first : wanted.first + wanted.size].split(_HEAD_TOKENS)
            found = [self.sampler.told(self.forward.logits(piece), target, wanted.num_top)
                     for piece, target in zip(pieces, targets.split(_HEAD_TOKENS), strict=True)]  # fmt: skip
            prompts.append(_joined(found))
        if not step.draws:
            return None, None, prompts
        logits_BV = self.forward.logits(gathered(inputs, hidden_TH))
        return *self.sampler.full(logits_BV, inputs, step.extras, self._allowed(step, decision, masks)), prompts

    def masks(self, step: Step, decision: Decision) -> Masks:
        """What the structures of a step allow."""
        found = {}
        for at in (extra.at for extra in step.extras if extra.masked):
            constraint = self._sequence(decision, at).constraint
            assert constraint is not None
            found[at] = constraint.allowed()
        return found

    def _allowed(self, step: Step, decision: Decision, masks: Masks | None) -> Tensor | None:
        """Bits of the tokens that structures allow [B, W]; none where nobody has one."""
        if not any(extra.masked for extra in step.extras):
            return None
        words = -(-self.vocab // 32)
        bits_BW: Ints = np.full((step.shape.rows, words), -1, dtype=np.int32)
        for at, bits in (self.masks(step, decision) if masks is None else masks).items():
            bits_BW[at] = np.frombuffer(bits.ljust(4 * words, b"\0")[: 4 * words], dtype=np.int32)
        return self.rows.send(bits_BW)

    @staticmethod
    def _sequence(decision: Decision, at: int) -> Sequence:
        first = len(decision.decodes)
        return decision.decodes[at] if at < first else decision.chunks[at - first].sequence

    def _sent(self, launched: Launched) -> Launched:
        """Begin to copy tokens to the host; what is asked for rarely is copied when it is read. A step without tokens
        is waited for as well, so that no more than two are ever under way."""
        if self.device.type == "cuda":
            if launched.tokens_B is not None:
                host = torch.empty(launched.tokens_B.shape, dtype=launched.tokens_B.dtype, pin_memory=True)
                launched.tokens_B = host.copy_(launched.tokens_B, non_blocking=True)
            launched.done = torch.cuda.Event()
            launched.done.record()
        return launched

    def tokens(self, launched: Launched) -> list[int]:
        """Wait for the device; log-probabilities are left with their sequences."""
        if launched.done is not None:
            launched.done.synchronize()
        _tell_prompts(launched)
        if launched.tokens_B is None:
            return []
        found, decision = launched.tokens_B.tolist(), launched.decision
        _tell(launched, found)
        first = len(decision.decodes)
        return found[:first] + [found[first + i] for i, chunk in enumerate(decision.chunks) if chunk.samples]


def null_step(shape: Shape, null_row: int) -> Any:
    """Padding alone."""
    ints: Ints = np.zeros(shape.size, dtype=np.int32)
    for name, (at, size) in shape.parts().items():
        if name in ("rows_T", "rows_B", "writes_B"):
            ints[at : at + size] = null_row
        elif name == "slots_GT":
            ints[at : at + size] = -1
    return ints


def _joined(found: list[TopLogprobs]) -> TopLogprobs:
    return TopLogprobs(chosen_B=torch.cat([x.chosen_B for x in found]), top_BN=torch.cat([x.top_BN for x in found]),
                       ids_BN=torch.cat([x.ids_BN for x in found]))  # fmt: skip


def _tell(launched: Launched, tokens: list[int]) -> None:
    told = launched.told
    if told is None:
        return
    for extra in launched.step.extras:
        if extra.num_top is not None:
            at = extra.at
            made = _logprob(tokens[at], told, at, extra.num_top)
            FastExecutor._sequence(launched.decision, at).logprobs.append(made)


def _tell_prompts(launched: Launched) -> None:
    """Each position once, however often a prompt is computed."""
    chunks = [c for c in launched.decision.chunks if c.sequence.request.params.prompt_logprobs is not None
              and min(c.start + c.size, c.sequence.num_prompt - 1) > c.start]  # fmt: skip
    for chunk, wanted, told in zip(chunks, launched.step.prompts, launched.prompts, strict=True):
        kept = chunk.sequence.prompt_logprobs
        for i, token in enumerate(wanted.targets):
            if chunk.start + i == len(kept):
                kept.append(_logprob(token, told, i, wanted.num_top))


def _logprob(token: int, told: TopLogprobs, at: int, num_top: int) -> Logprob:
    values, ids = told.top_BN[at, :num_top].tolist(), told.ids_BN[at, :num_top].tolist()
    return Logprob(token, float(told.chosen_B[at]), tuple(zip(ids, values, strict=True)))
