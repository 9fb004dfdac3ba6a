"""The executor: a decision becomes one array, one copy to the device and one CUDA graph, and nothing waits.

Tokens come back by an asynchronous copy that `tokens` waits for, so the host schedules the next step meanwhile. On a
CPU the same code runs without graphs and without padding. `PlainExecutor` is the reference.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.runner.adapter_slots import AdapterSlots
from armillary.engine.runner.batch_encoder import Encoder
from armillary.engine.runner.cuda_graphs import GraphSteps, Steps, first_line, is_out_of_memory
from armillary.engine.runner.device_state import DeviceRows, block_shape
from armillary.engine.runner.engine_kernels import EngineKernels, kernels_of_packed, pick_kernels
from armillary.engine.runner.expert_counters import ExpertCounters
from armillary.engine.runner.forward import Forward, layer_places
from armillary.engine.runner.pooled_prompts import pool, store_pooled
from armillary.engine.runner.recurrent_states import make_states
from armillary.engine.runner.sampler import DeviceSampler, Masks
from armillary.engine.runner.step_input import Ints, Shape, Step, gathered, inputs_of, null_step
from armillary.engine.runner.step_results import sampled_sequence, set_drafts, store_logprobs, store_prompt_logprobs
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.settings import rope_switch
from armillary.engine.scheduler.step_loop import StepTooLarge
from armillary.engine.speculative.draft import Draft
from armillary.model.moe.packed_experts import stackable_experts, weight_formats
from armillary.model.transformer import Transformer

# T tokens, B sequences, V vocabulary, W words of 32 tokens

_HEAD_TOKENS = 256  # prompt tokens whose logits are in memory at once


@dataclass(kw_only=True)
class Launched:
    """A step in flight."""

    decision: Decision
    step: Step
    tokens_B: Tensor | None = None
    """on the host after `done`, as are the next two"""
    logprobs: Tensor | None = None
    """log-probabilities of the sequences that want them (`DeviceSampler.logprobs`)"""
    prompts: list[Tensor] = field(default_factory=list)
    pooled: Tensor | None = None
    """vectors of pooled tokens, one after the other"""
    drafts: Tensor | None = None
    """draft tokens"""
    expert_counts_LE: Tensor | None = None
    """counters of the experts after this step, now and then"""
    done: torch.cuda.Event | None = None
    logits_BV: Tensor | None = None
    """where tokens are not sampled yet: constraint masks depend on tokens of the step before"""

    @property
    def unsampled(self) -> bool:
        """Whether `draw` is still to be called."""
        return self.logits_BV is not None


class Proposer(Protocol):
    """Proposes draft tokens (`draft_model.DraftModel`)."""

    def take(self, step: Step) -> None:
        """Follow the changes that a step makes to KV blocks."""

    def encode(self, drafts: Items[Draft]) -> list[tuple[Shape, Ints]]:
        """The passes that propose `drafts`."""

    def propose(self, step: Step) -> None:
        """Run the passes of a step: its draft tokens are then in their rows."""


class FastExecutor:
    """Encoder, rows on the device, the model, the sampler, and graphs of them."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_running: int,
        max_model_len: int,
        max_tokens: int = 2048,
        new_seed: Callable[[], int] = lambda: 0,
        kernels: EngineKernels | None = None,
        graphs: bool | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_heads: int | None = None,
        max_rows: int | None = None,
        rows: DeviceRows | None = None,
        ranks: int = 1,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`max_rows`: most rows of a step where draft tokens are among them; none: there are none. `rows` of another
        executor, where this one runs its draft model."""
        weight, config = next(model.parameters()), model.config
        self.device, self.vocab = weight.device, config.vocab
        self.max_running, self.max_tokens = max_running, max_tokens
        self.max_rows = max_running if max_rows is None else max_rows
        self.draft_model: Proposer | None = None
        stackable = stackable_experts(model) if ranks == 1 else []
        kernels = kernels or pick_kernels(
            config,
            dtype=weight.dtype,
            device=self.device,
            batch=max_running,
            experts=weight_formats(stackable),
        )
        self.kernels = kernels_of_packed(kernels, model, stackable, weight)
        pages = -(-max_model_len // cache.block_tokens)
        slots = 1 + max((slot for _, slot in layer_places(cache.groups, model).values()), default=0)
        blocks = (slots, cache.pool.num_blocks, *block_shape(config, cache.block_tokens, kv_heads))
        self.rows = rows or DeviceRows(
            max_running=max_running,
            max_model_len=max_model_len,
            pages=pages,
            groups=len(cache.groups),
            blocks=blocks,
            dtype=kv_dtype or weight.dtype,
            device=self.device,
            states=make_states(config, max_running=max_running, weight=weight, ranks=ranks),
        )
        if rows is None and cache.offload is not None:
            self.rows.allocate(cache.pool.num_blocks, cache.offload.num_blocks)
        with torch.inference_mode():
            self.forward = Forward(model, self.rows, cache.groups, self.kernels, max_model_len=max_model_len)
        self.forward.adapters = adapters
        self.sampler = DeviceSampler(self.rows, self.kernels)
        self.expert_counters = ExpertCounters(self.forward.expert_counts_LE)
        self.steps = self._steps(graphs, max_tokens, drafts=max_rows is not None)
        self.encoder = Encoder(
            max_running=max_running,
            max_model_len=max_model_len,
            block_tokens=cache.block_tokens,
            groups=len(cache.groups),
            new_seed=new_seed,
            fit=self.steps.fit,
            long_rope=rope_switch(config) is not None,
        )

    def _steps(self, graphs: bool | None, max_tokens: int, *, drafts: bool) -> Steps:
        if self.device.type != "cuda" or graphs is False or not self.kernels.capturable:
            return Steps(self._compute, self.rows.send)
        return GraphSteps(
            self._compute,
            self.rows.send,
            max_running=self.max_rows,
            max_tokens=max_tokens,
            drafts=drafts,
            adapters=self.forward.adapters is not None,
            device=self.device,
            null=lambda shape: null_step(shape, self.max_running),
        )

    @property
    def pads_alike(self) -> bool:
        """Whether the steps of all dp ranks are padded to one shape, so that what they exchange has one, too: they run
        as CUDA graphs."""
        return self.forward.gathered_tokens is not None and self.encoder.pads

    def warm(self) -> int:
        """Capture CUDA graphs before the first request; returns their number."""
        with torch.inference_mode():
            return self.steps.warm(self.encoder.groups)

    def run_largest(self) -> None:
        """Run the largest step, on padding, to allocate the memory that steps take."""
        shape = Shape(*self.encoder.fit(self.max_tokens, self.max_rows, False), self.encoder.groups, False)
        with torch.inference_mode():
            self._compute(shape, True, self.rows.send(null_step(shape, self.max_running)))

    def run_padding(self, shape: Shape, packed: Tensor) -> None:
        """Run a step of padding without sampling, to time it."""
        self._compute(shape, False, packed)

    def graph_bytes(self) -> int:
        """Memory that CUDA graphs will take, estimated by capturing and freeing a few."""
        with torch.inference_mode():
            return self.steps.trial(self.encoder.groups)

    def launch(self, decision: Decision) -> Launched:
        """Start a step; where constraints limit its tokens, they are sampled later by `draw`."""
        return self._contained(lambda: self.run(self.encode(decision), decision))

    def encode(self, decision: Decision) -> Step:
        """The step, with the passes of the draft model before it."""
        step = self.encoder.encode(decision)
        if decision.drafts and self.draft_model is not None:
            step.passes = self.draft_model.encode(decision.drafts)
        return step

    def draw(self, launched: Launched) -> None:
        """Sample an `unsampled` step: its constraints know all earlier tokens now."""
        self._contained(lambda: self._drawn(launched, self.masks(launched.step, launched.decision)))

    def _contained(self, work: Callable[[], Any]) -> Any:
        """Where an allocation fails, free cached memory and raise `StepTooLarge`: what was launched of the step wrote
        nothing that a smaller step does not write again."""
        try:
            with torch.inference_mode():
                return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        if self.device.type == "cuda":  # after the error is gone, whose frames hold the step's tensors
            torch.cuda.empty_cache()
        raise StepTooLarge(
            f"there was no memory for this request alone ({message}); lower serve.memory_fraction, shorten "
            "its prompt, or ask for no log-probabilities or penalties"
        )

    def run(self, step: Step, decision: Decision, masks: Masks | None = None) -> Launched:
        """Run an encoded step; `masks` where another rank has computed them."""
        self.rows.take(step)
        launched = Launched(decision=decision, step=step)
        if not step.shape.tokens:  # on this dp rank
            self.forward.run_experts_only()
            return self._sent(launched)
        if self.draft_model is not None:
            self.draft_model.take(step)
        if step.drafts is not None:
            if self.draft_model is not None:
                self.draft_model.propose(step)
            launched.drafts = self.rows.drafted(step)
        if (pipeline := self.forward.pipeline) is not None:
            pipeline.receive(step.shape.tokens)
            if not pipeline.is_last:
                pipeline.send(self.steps.run(step.shape, True, step.ints))
                return self._sent(launched)
        if step.prompts or step.pooled:
            inputs = inputs_of(step.shape, self.rows.send(step.ints))
            hidden_TH = self.forward.hidden(inputs)
            launched.prompts = self._prompt_logprobs(step, hidden_TH)
            logits_BV = self.forward.logits(gathered(inputs, hidden_TH)) if step.draws else None
            launched.pooled = pool(self.forward, step, hidden_TH, logits_BV) if step.pooled else None
        else:
            quick = (step.draws or self.pads_alike) and not step.extras
            result = self.steps.run(step.shape, quick, step.ints)
            launched.tokens_B, logits_BV = (result, None) if quick else (None, result)
        if step.draws and logits_BV is not None:
            launched.logits_BV = logits_BV
            if masks is None and any(extra.masked for extra in step.extras):
                return launched
            return self._drawn(launched, masks or {})
        return self._sent(launched)

    def _compute(self, shape: Shape, quick: bool, packed: Tensor) -> Tensor:
        """Tokens [B] where the fast sampler suffices, else logits [B, V]; of a stage without the head its hidden
        states."""
        inputs = self.forward.inputs(shape, packed)
        if not self.forward.has_head:
            return self.forward.hidden(inputs)
        logits_BV = self.forward.logits(self.forward.last(inputs))
        return self.sampler.quick(logits_BV, inputs) if quick else logits_BV

    def _drawn(self, launched: Launched, masks: Masks) -> Launched:
        """Sample a step with rows that need the full sampler."""
        step, logits_BV = launched.step, launched.logits_BV
        assert logits_BV is not None
        inputs = inputs_of(step.shape, self.rows.send(step.ints))
        launched.tokens_B, launched.logprobs = self.sampler.full(logits_BV, inputs, step, masks)
        launched.logits_BV = None
        return self._sent(launched)

    def _prompt_logprobs(self, step: Step, hidden_TH: Tensor) -> list[Tensor]:
        """Log-probabilities of prompt tokens, a few at a time."""
        prompts = []
        for wanted in step.prompts:
            targets = torch.tensor(wanted.targets, device=self.device)
            pieces = hidden_TH[wanted.first : wanted.first + wanted.size].split(_HEAD_TOKENS)
            logprobs = [
                self.sampler.logprobs(self.forward.logits(piece), target, wanted.num_top)
                for piece, target in zip(pieces, targets.split(_HEAD_TOKENS), strict=True)
            ]
            prompts.append(torch.cat(logprobs))
        return prompts

    def masks(self, step: Step, decision: Decision) -> Masks:
        """Constraint masks of a step; none for sequences that ended meanwhile."""
        masks = {}
        for at in (extra.at for extra in step.extras if extra.masked):
            seq = sampled_sequence(decision, at)
            assert seq.constraint is not None
            if seq.finish is None:
                masks[at] = seq.constraint.allowed()
        return masks

    def _sent(self, launched: Launched) -> Launched:
        """Start to copy tokens and log-probabilities to the host. A step without tokens is waited for as well, so that
        at most two are in flight."""
        launched.expert_counts_LE = self.expert_counters.start_copy()
        if self.device.type == "cuda":
            launched.tokens_B, launched.logprobs = _to_host(launched.tokens_B), _to_host(launched.logprobs)
            launched.prompts = [host for logprobs in launched.prompts if (host := _to_host(logprobs)) is not None]
            launched.pooled, launched.drafts = _to_host(launched.pooled), _to_host(launched.drafts)
            launched.expert_counts_LE = _to_host(launched.expert_counts_LE)
            launched.done = torch.cuda.Event()
            launched.done.record()
        return launched

    def tokens(self, launched: Launched) -> list[int]:
        """Wait for the device; log-probabilities are stored in their sequences."""
        if launched.done is not None:
            launched.done.synchronize()
        self.expert_counters.arrived(launched.expert_counts_LE)
        store_prompt_logprobs(launched.decision, launched.step, launched.prompts)
        if launched.pooled is not None:
            store_pooled(launched.decision, launched.pooled.tolist())
        if launched.tokens_B is None:
            return []
        tokens, decision = launched.tokens_B.tolist(), launched.decision
        if launched.drafts is not None:
            set_drafts(decision, launched.drafts.tolist())
        if launched.logprobs is not None:
            store_logprobs(decision, launched.step, launched.logprobs, tokens)
        first = len(decision.decodes)
        return tokens[:first] + [tokens[first + i] for i, chunk in enumerate(decision.chunks) if chunk.samples]


def _to_host(tensor: Tensor | None) -> Tensor | None:
    """Asynchronous copy to pinned host memory."""
    if tensor is None:
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
