"""AdamW with optimizer offload: fp32 weights and states are on the host, or in a mapped file.

Gradients are copied to the host, stepped by torch's fused AdamW of the CPU and copied back as weights, a slice at a
time: while one slice is stepped, the gradients of the next and the weights of the last are copied. The step may overlap
the next forward pass, whose layers wait for their own slices only. The arithmetic is that of a step on the device.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.model.transformer import Transformer
from armillary.parallel.collectives import WaitTimer
from armillary.parallel.ddp import local_of
from armillary.parallel.host_memory import CopyStream, Event, HostMemory, compute_after, computed, wait_for
from armillary.training.step.offloaded_states import STATES, HostStates, Slice, flat, sharded_as, slices_of, widest

LAUNCH_THREADS = 2
"""threads that launch device work: forward, and autograd's own"""


class HostAdamW(torch.optim.AdamW):
    """Its state is torch's (step, exp_avg, exp_avg_sq), so that checkpoints of one can be read by another; its weights
    are the master weights, of which the device has a copy, maybe in a lower precision."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        *,
        device: torch.device,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        """Of the model's parameters in `groups`; stored in a file in `folder` where it is given."""
        super().__init__(groups, foreach=False, fused=False, **options)
        grouped = {p for group in self.param_groups for p in group["params"]}
        parameters = [p for p in model.parameters() if p in grouped]  # in the forward pass's order
        self.device, self.overlaps, self.memory = device, False, HostMemory(device)
        self.timer: WaitTimer | None = None
        """is told how long a step waits for this"""
        self.slices = slices_of(parameters)
        self.to_host, self.to_device = CopyStream(device), CopyStream(device)
        self.states = HostStates(parameters, self.memory, folder)
        most = max((slice_.size for slice_ in self.slices), default=0)
        self.gradients = [self.memory.lasting(most, widest(parameters)) for _ in range(2)]
        self.check = self.memory.lasting(1, torch.float32)
        """not finite where the step is to be skipped"""
        self._progress = Progress(done=len(self.slices))
        for p in parameters:
            averages = {name: sharded_as(self.states.of(p, name), p) for name in STATES}
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32)} | averages

    @property
    def host_bytes(self) -> int:
        """Size in host memory or on disk, buffers included."""
        return self.memory.bytes + self.states.file_bytes

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The master weight of a parameter, sharded over ranks as it is."""
        self.finish()
        return sharded_as(self.states.of(parameter, "weight"), parameter)

    @torch.no_grad()
    def upload_weights(self) -> None:
        """Copy weights that were read here, from a checkpoint, to the device."""
        self.finish()
        for parameter in self.state:
            flat(parameter).copy_(self.states.of(parameter, "weight"))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, check: Tensor | None = None
    ) -> None:
        """`scale`, one number on the device, multiplies every gradient. Where `check`, another one, is not finite,
        nothing changes: it is copied with the first gradients."""
        assert closure is None, "this step runs no closure"
        self.finish()
        rates = {p: {**group, "params": None} for group in self.param_groups for p in group["params"]}
        gradients = {p: local_of(p.grad).reshape(-1) for p in rates if p.grad is not None}
        for p in gradients:
            self.state[p]["step"] += 1
        self._progress = Progress(done=0)
        step = _Step(
            optimizer=self,
            gradients=gradients,
            stepped=frozenset(gradients),
            scale=scale,
            check=check,
            rates=rates,
            ready=computed(self.device),
            progress=self._progress,
        )
        if self.overlaps:
            self._worker.submit(step.run)
            return
        self._timed(step.run_and_wait)

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        """One thread for all steps, with all cores but those that launch the forward pass at the same time: a core
        that two threads want delays all others."""
        cores = max(1, torch.get_num_threads() - LAUNCH_THREADS)
        return ThreadPoolExecutor(1, "offloaded optimiser", initializer=torch.set_num_threads, initargs=(cores,))

    def finish(self) -> None:
        """Wait until every weight is on the device."""
        self.wait(len(self.slices))

    def wait(self, number: int) -> None:
        """Until the first `number` slices are stepped; the device waits for their copies."""
        compute_after(self._progress.wait(number), self.device)

    def overlap_with(self, model: Transformer) -> None:
        """From now on a step overlaps the next forward pass: layers wait for their own weights, and what follows the
        model for all."""
        self.overlaps = True
        last = {p: number for number, slice_ in enumerate(self.slices, 1) for p in slice_.parameters}
        parts = [part for part in (model.embedding, model.position_embedding) if part is not None]
        first = max((last.get(p, 0) for part in parts for p in part.parameters()), default=0)
        model.register_forward_pre_hook(lambda *_: self._timed(lambda: self.wait(first)))
        for block in model.blocks.values():
            own = max((last.get(p, 0) for p in block.parameters()), default=0)
            block.register_forward_pre_hook(lambda *_, own=own: self._timed(lambda: self.wait(own)))
        model.register_forward_hook(lambda *_: self._timed(self.finish))

    def _timed(self, work: Callable[[], None]) -> None:
        begin = self.timer.mark() if self.timer is not None else None
        work()
        if self.timer is not None:
            self.timer.until_now(begin)


class Progress:
    """How many slices of a step are done, and the copy after which the last of them is on the device."""

    def __init__(self, done: int) -> None:
        self._done = done
        self._event: Event = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, event: Event) -> None:
        with self._changed:
            self._done, self._event = self._done + 1, event
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, number: int) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._event


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step over all slices. `gradients` are those that are not on the host yet, `stepped` the parameters that have
    one; the step is taken where `check` is finite, and `ready` is when the gradients are computed."""

    optimizer: HostAdamW
    gradients: dict[Tensor, Tensor]
    stepped: frozenset[Tensor]
    scale: Tensor | None
    check: Tensor | None
    rates: Mapping[Tensor, Mapping[str, Any]]
    ready: Event
    progress: Progress

    def run_and_wait(self) -> None:
        self.run()
        self.optimizer.finish()

    def run(self) -> None:
        """An error is raised in the threads that wait for the step."""
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self.progress.fail(error)

    def _run(self) -> None:
        optimizer = self.optimizer
        slices, buffers, states = optimizer.slices, optimizer.gradients, optimizer.states
        sent: list[Event] = []
        taken = True
        self._copy_check()
        coming = self._copy_gradients(slices[0], buffers[0]) if slices else None
        for number, slice_ in enumerate(slices):
            following = None
            if number + 1 < len(slices):
                states.prefetch(slices[number + 1])
                if number and states.file_bytes:
                    wait_for(sent[number - 1])  # weights of a file are copied through the buffer
                following = self._copy_gradients(slices[number + 1], buffers[(number + 1) % 2])
            wait_for(coming)
            taken = self._is_taken() if number == 0 else taken
            self._free_gradients(slice_)
            if taken:
                self._step(slice_, buffers[number % 2])
            sent.append(self._copy_weights(slice_, buffers[number % 2]) if taken else None)
            states.release(slice_)
            self.progress.add(sent[-1])
            coming = following

    def _copy_check(self) -> None:
        """Before the gradients: it is on the host when the first of them are."""
        if self.check is not None:
            with self.optimizer.to_host.on(self.ready):
                self.optimizer.check.copy_(self.check.reshape(1), non_blocking=True)

    def _is_taken(self) -> bool:
        """Whether the gradients are finite; if not, the step is not counted."""
        if self.check is None or bool(self.optimizer.check.isfinite()):
            return True
        for parameter in self.stepped:
            self.optimizer.state[parameter]["step"] -= 1
        return False

    def _free_gradients(self, slice_: Slice) -> None:
        """Of a slice that is on the host."""
        for piece in slice_.pieces:
            if piece.end == local_of(piece.parameter).numel():
                self.gradients.pop(piece.parameter, None)

    def _copy_gradients(self, slice_: Slice, buffer: Tensor) -> Event:
        """To the host, in the dtype in which they are summed."""
        copy_stream = self.optimizer.to_host
        with copy_stream.on(self.ready):
            for piece in slice_.pieces:
                if piece.parameter not in self.stepped:
                    continue
                gradient = self.gradients[piece.parameter][piece.begin : piece.end].to(buffer.dtype)
                target = buffer[piece.at : piece.at + len(gradient)]
                if self.optimizer.device.type == "cpu" and self.scale is not None:
                    torch.mul(gradient, self.scale, out=target)
                else:
                    scaled = gradient if self.scale is None else gradient * self.scale
                    target.copy_(scaled, non_blocking=True)
        return copy_stream.mark()

    def _step(self, slice_: Slice, buffer: Tensor) -> None:
        """AdamW of torch, once for all pieces with the same settings."""
        states, state = self.optimizer.states, self.optimizer.state
        groups: dict[tuple[float, float], list[Any]] = {}
        for piece in slice_.pieces:
            if piece.parameter in self.stepped:
                rates = self.rates[piece.parameter]
                groups.setdefault((float(rates["lr"]), rates["weight_decay"]), []).append(piece)
        for (rate, decay), pieces in groups.items():
            rates = self.rates[pieces[0].parameter]
            weights, *averages = (
                [states.of(p.parameter, name)[p.begin : p.end] for p in pieces] for name in ("weight", *STATES)
            )
            torch._fused_adamw_(
                weights,
                [buffer[p.at : p.at + p.end - p.begin] for p in pieces],
                *averages,
                [],
                [state[p.parameter]["step"] for p in pieces],
                lr=rate,
                beta1=rates["betas"][0],
                beta2=rates["betas"][1],
                weight_decay=decay,
                eps=rates["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _copy_weights(self, slice_: Slice, buffer: Tensor) -> Event:
        """To the device; those of a file go through the buffer, which is pinned."""
        copy_stream, states = self.optimizer.to_device, self.optimizer.states
        with copy_stream.on(self.ready):
            for piece in slice_.pieces:
                if piece.parameter not in self.stepped:
                    continue
                source = states.of(piece.parameter, "weight")[piece.begin : piece.end]
                if states.file_bytes and self.optimizer.device.type != "cpu":
                    source = buffer[piece.at : piece.at + len(source)].copy_(source)
                target = flat(piece.parameter)[piece.begin : piece.end]
                if target.dtype != source.dtype:  # cast there: the link is faster than the host
                    source = source.to(target.device, non_blocking=True)
                target.copy_(source, non_blocking=True)
        return copy_stream.mark()
