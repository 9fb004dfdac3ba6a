"""The engine: requests in, deltas of their output out, a record of every step and request.

`generate` serves a list of requests and returns; an `EngineThread` serves requests in a thread of its own until it is
stopped.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from armillary.engine.output.output_text import OutputDelta, OutputProcessor
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import FinishReason, Logprob, Sequence
from armillary.engine.scheduler.decision import Decision, StepTimeModel
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.engine.scheduler.step_loop import Loop, StepFailed
from armillary.engine.telemetry.expert_gauges import ExpertGauges
from armillary.engine.telemetry.gauges import request_gauges, state_gauges, step_gauges
from armillary.errors import BadInput, MissingPart

if TYPE_CHECKING:
    from armillary.engine.adapter_table import AdapterTable

Record = Callable[..., None]  # `GaugeWriter.write`, or anything that takes gauges and step= or request=
_NAP_S = 0.001  # sleep while a dynamic batch waits for its window


@dataclass(kw_only=True)
class Completion:
    """One complete output."""

    request: Request
    prompt: str = ""
    """text of its prompt, where `generate` was given texts"""
    index: int = 0
    """which of the request's n completions"""
    tokens: list[int] = field(default_factory=list)
    """output tokens, the end token included"""
    text: str = ""
    """output text, without end tokens and stop strings"""
    finish: FinishReason | None = None
    error: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    """of the output tokens, where requested"""
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    """of the prompt's tokens but the first, where requested"""
    pooled: list[float] = field(default_factory=list)
    """vector of the prompt, where requested instead of tokens"""

    def add(self, delta: OutputDelta) -> None:
        self.tokens += delta.tokens
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish, self.error = delta.finish, delta.error
        self.pooled = delta.sequence.pooled
        self.prompt_logprobs = (delta.sequence.leader or delta.sequence).prompt_logprobs


class Transfer(Protocol):
    """Exchanges KV blocks with another engine (`engine/disaggregation`). Called in the engine's thread."""

    def wants(self, seq: Sequence) -> bool:
        """Whether a new sequence waits until the blocks of its prompt have come."""

    def ask(self, seq: Sequence) -> None:
        """Such a sequence is in the request table now."""

    def after_step(self) -> None:
        """An iteration of the loop is over."""

    def gauges(self) -> dict[str, float]:
        """What was exchanged."""


class Engine:
    """Runs steps, and turns their tokens into output and records."""

    def __init__(
        self,
        loop: Loop,
        output_processor: OutputProcessor,
        *,
        record: Record | None = None,
        roofline: StepTimeModel | None = None,
        expert_layers: tuple[int, ...] = (),
    ) -> None:
        """`expert_layers`: numbers of the layers whose experts the executor counts."""
        self.loop = loop
        self.scheduler = loop.scheduler
        self.output_processor = output_processor
        self.adapters: AdapterTable | None = None  # LoRA adapters that requests may name
        self.transfer: Transfer | None = None  # of KV blocks with another engine, where this one runs in a thread
        self._record = record
        self._roofline = roofline
        self._experts = ExpertGauges(expert_layers) if expert_layers else None
        self._expert_counts: Any = None  # as last read
        self._open: dict[int, dict[str, float]] = {}  # records of the steps in flight
        self._ended_at: float | None = None  # end of the last step, where the next follows at once
        self._busy_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self.scheduler.has_work or bool(self.scheduler.under_way)

    def under_way(self) -> tuple[int, float | None]:
        """For another thread: tokens of the steps in flight, and the seconds they should take at most, by earlier steps
        or, before there are any, by the roofline; None where neither is known."""
        decisions = [decision for decision in tuple(self.scheduler.under_way) if not decision.empty]
        expected = [self.loop.times.most_seconds(decision.work) for decision in decisions]
        if None in expected and self._roofline is not None:
            expected = [self._roofline.seconds(decision.work) for decision in decisions]
        tokens = sum(decision.num_tokens for decision in decisions)
        return tokens, None if None in expected else sum(seconds or 0.0 for seconds in expected)

    def step(self) -> list[OutputDelta]:
        """One step; a step that fails ends the sequences in it and no others."""
        begin = self.loop.clock() if self._ended_at is None else self._ended_at
        try:
            decision, outcome = self.loop.step()
        except StepFailed as error:
            self._open.clear()
            return self.end(self.loop.fail(str(error)))
        now = self.loop.clock()
        self._busy_s += now - begin
        deltas = self.output_processor.take(decision, outcome, now)
        if self._record is not None:
            self._record_step(decision, now - begin, len(outcome.finished), self._record)
        self._ended_at = now if self.scheduler.request_table.running else None
        return self._recorded(deltas)

    def state(self) -> dict[str, Any]:
        """Gauges of the scheduler and of the experts; called in the engine's thread."""
        if self._experts is not None and not self.busy:
            self._expert_counters().refresh()
        exchanged = {} if self.transfer is None else self.transfer.gauges()
        return state_gauges(self.scheduler) | {"busy_s_total": self._busy_s} | self._expert_gauges() | exchanged

    def _expert_gauges(self) -> dict[str, Any]:
        """By the last copy of the executor's counters; none for a model without experts."""
        if self._experts is None or (counts := self._expert_counters().latest) is None:
            return {}
        if counts is not self._expert_counts:
            self._expert_counts = counts
            self._experts.take(counts, self.loop.clock())
        return self._experts.gauges

    def _expert_counters(self) -> Any:
        """Of an executor that runs the model."""
        return self.loop.executor.expert_counters  # type: ignore[attr-defined]

    def _record_step(self, decision: Decision, seconds: float, left: int, record: Record) -> None:
        """With overlap, an iteration decides and launches one step and waits for another: the time is split between
        both, and a step's record is written once its tokens are back."""
        loop, own_s = self.loop, seconds - self.loop.wait_s
        if not decision.empty:
            times = {
                "engine_step_s": own_s,
                "engine_schedule_s": loop.schedule_s,
                "engine_launch_s": loop.launch_s,
                "engine_wait_s": 0.0,
            }
            if self._roofline is not None:
                times["engine_roofline_fraction"] = self._roofline.seconds(decision.work)  # divided once it is over
            experts = {name: value for name, value in self._expert_gauges().items() if isinstance(value, float)}
            self._open[decision.number] = step_gauges(self.scheduler, decision, left) | experts | times
        taken = [number for number in loop.taken if number in self._open]
        for number in taken:
            gauges = self._open.pop(number)
            gauges["engine_wait_s"] = loop.wait_s / len(taken)
            gauges["engine_step_s"] += gauges["engine_wait_s"]
            if self._roofline is not None:
                gauges["engine_roofline_fraction"] /= max(gauges["engine_step_s"], 1e-9)
            record(gauges, step=number)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Abort a request; an unknown or finished one is ignored."""
        return self.end(self.scheduler.abort(request_id, self.loop.clock()))

    def end(self, ended: Iterable[Sequence]) -> list[OutputDelta]:
        """Last deltas of sequences that ended between steps."""
        return self._recorded(self.output_processor.end(ended))

    def _recorded(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        record = self._record
        if record is not None:
            for delta in deltas:
                if delta.finish is not None:
                    record(request_gauges(delta.sequence), request=delta.sequence.id)
        return deltas

    def generate(
        self, requests: Iterable[Request], constraints: Mapping[str, MakeConstraint] | None = None
    ) -> list[Completion]:
        """Serve all `requests`: n completions each, in order; an invalid request gives one with an error."""
        by_sequence: dict[Sequence, Completion] = {}
        completions: list[Completion] = []
        for request in requests:
            try:
                entered = self.scheduler.submit(request, self.loop.clock(), (constraints or {}).get(request.id))
            except (BadInput, MissingPart) as error:
                completions.append(Completion(request=request, finish="error", error=str(error)))
                continue
            by_sequence |= {seq: Completion(request=request, index=seq.index) for seq in entered}
            completions += (by_sequence[seq] for seq in entered)
        with gc_frozen():
            while self.busy:
                deltas = self.step()
                for delta in deltas:
                    by_sequence[delta.sequence].add(delta)
                if not deltas and not self.scheduler.under_way and not self.scheduler.request_table.running:
                    time.sleep(_NAP_S)
        return completions


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now is left out of collections until the end."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
