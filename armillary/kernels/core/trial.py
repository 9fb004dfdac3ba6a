"""How long a version takes for a case, forward and backward apart, on inputs that are not in a cache.

Several sets of random inputs, together several times the last cache, are taken in turn. On a GPU the forwards of all
sets are captured in one CUDA graph and their backwards in a second, so that the device is timed and not the host.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.agreement import as_tuple, with_grad
from armillary.kernels.core.graph_capture import capturing, waits_for_device
from armillary.kernels.core.op import Case, Op
from armillary.kernels.core.timing import Call, time_calls

LOG = logging.getLogger("armillary.kernels")
ONE_CALL = "one call"
_How = dict[str, float]
_TIMES_CACHE = 4
_CPU_CACHE = 8 << 20
_MAX_SETS = 64
_WORTH_WHILE_S = 0.02
"""a call that takes less is timed properly whatever it took: the host's clock counts its launch too"""
_GRAPH_S, _MOST_CALLS = 2e-3, 256
"""that a graph of forwards takes at least, as far as so many calls go"""
_SHARE_OF_MEMORY = 0.2
"""of free memory that inputs may take; outputs and gradients need as much again or more"""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one call."""

    forward_s: float
    """the forward, with what it keeps for the backward"""
    backward_s: float | None = None
    """the backward alone; None for an op without"""
    method: str = ""
    """how time was taken"""

    @property
    def seconds(self) -> float:
        return self.forward_s + (self.backward_s or 0.0)


def input_sets(op: Op, case: Case) -> list[tuple[Any, ...]]:
    """Enough sets of random inputs that none is still in a cache when its turn comes again."""
    device = torch.device(case.device)
    generator = torch.Generator(device).manual_seed(0)
    first = op.inputs(case, generator)
    size = max(1, sum(_bytes(x) for x in first))
    cache, free = _cache_and_free(device)
    count = max(1, min(_MAX_SETS, ceil(_TIMES_CACHE * cache / size) + 1, int(_SHARE_OF_MEMORY * free / size)))
    return [first, *(op.inputs(case, generator) for _ in range(count - 1))]


def time_version(
    run: Callable[..., Any],
    op: Op,
    sets: list[tuple[Any, ...]],
    *,
    budget_s: float,
    rest_s: float = 0.0,
    hopeless_s: float = inf,
    name: str = "",
) -> Times:
    """Time `run`, version `name`, on these sets for about `budget_s` a direction; `rest_s` as in time_calls. What takes
    longer than `hopeless_s`, and long at all, is timed by one call."""
    device = next(x.device for x in sets[0] if isinstance(x, Tensor))
    leaves = [with_grad(inputs, op.grads) for inputs in sets]
    run_once(run, op, leaves[0])
    once = _one_call(run, op, leaves[-1], device) if hopeless_s < inf else None
    if once is not None and once.seconds > max(hopeless_s, _WORTH_WHILE_S):
        return once
    if device.type == "cuda":
        why = waits_for_device(lambda: run_once(run, op, leaves[0]))
        try:
            if not why:
                return _captured(run, op, leaves, device, {"budget_s": budget_s, "rest_s": rest_s})
        except RuntimeError as error:
            why = _first_line(error)
        what = f"{op.name}, {name}" if name else op.name
        LOG.warning("%s: not captured in a CUDA graph, timed call by call: %s", what, why)
        torch.cuda.synchronize(device)
    return _called(run, op, leaves, device, {"budget_s": budget_s, "rest_s": rest_s})


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def run_once(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...]) -> None:
    """A forward, and a backward where the op has one."""
    leaves = with_grad(inputs, op.grads)
    with torch.set_grad_enabled(bool(op.grads)):
        outputs = as_tuple(run(*leaves))
        if op.grads:
            _backward(leaves, outputs, _grad_outputs(outputs), op)


def _one_call(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...], device: Any) -> Times:
    """One forward and one backward by the host's clock, after a warm-up."""
    marks = []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    with torch.set_grad_enabled(bool(op.grads)):
        mark()
        outputs = as_tuple(run(*inputs))
        mark()
        grads = _grad_outputs(outputs) if op.grads else []
        mark()
        if op.grads:
            _backward(inputs, outputs, grads, op)
        mark()
    backward_s = marks[3] - marks[2] if op.grads else None
    return Times(forward_s=marks[1] - marks[0], backward_s=backward_s, method=ONE_CALL)


def _captured(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]], device: Any, how: _How) -> Times:
    _warm_up(run, op, leaves[:2], device)
    many = leaves * _passes(run, op, leaves)
    forward, kept = _forward_graph(run, op, many)
    times = [time_calls([lambda: forward.replay()], device, **how, graph=False).seconds]
    if op.grads:
        grads = [_grad_outputs(outputs) for outputs in kept]
        backward, kept_grads = torch.cuda.CUDAGraph(), []
        with capturing(backward, forward.pool()):
            kept_grads = [_backward(*three, op) for three in zip(many, kept, grads, strict=True)]
        times.append(time_calls([lambda: backward.replay()], device, **how, graph=False).seconds)
        del kept_grads
    forward_s, *rest = (seconds / len(many) for seconds in times)
    return Times(forward_s=forward_s, backward_s=rest[0] if rest else None, method="CUDA graph")


def _forward_graph(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
    """The forwards of these inputs in one graph, and what they give."""
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.set_grad_enabled(bool(op.grads)), capturing(graph, torch.cuda.graph_pool_handle()):
        kept = [as_tuple(run(*inputs)) for inputs in leaves]
    return graph, kept


def _passes(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]]) -> int:
    """How often all sets go into one graph: launching a graph takes microseconds, which a long one hides."""
    graph, kept = _forward_graph(run, op, leaves)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    del kept
    wanted = ceil(_GRAPH_S / max(1e-6, begin.elapsed_time(end) / 1e3))
    return max(1, min(wanted, _MOST_CALLS // len(leaves)))


def _warm_up(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]], device: Any) -> None:
    """On a side stream, as capture wants it: compilers and libraries set themselves up here."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for inputs in leaves:
            run_once(run, op, inputs)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def _called(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]], device: Any, how: _How) -> Times:
    """Without a graph: forward alone, then both, and the difference."""
    with torch.set_grad_enabled(bool(op.grads)):
        forward = time_calls([_call(run, inputs) for inputs in leaves], device, **how, graph=False)
        method = f"calls, {forward.method}"
        if not op.grads:
            return Times(forward_s=forward.seconds, method=method)
        grads = _grad_outputs(as_tuple(run(*leaves[0])))
        both = time_calls([_both(run, op, inputs, grads) for inputs in leaves], device, **how, graph=False)
    return Times(forward_s=forward.seconds, backward_s=max(0.0, both.seconds - forward.seconds), method=method)


def _call(run: Callable[..., Any], inputs: tuple[Any, ...]) -> Call:
    return lambda: run(*inputs)


def _both(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...], grads: list[Tensor | None]) -> Call:
    return lambda: _backward(inputs, as_tuple(run(*inputs)), grads, op)


def _backward(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], grads: Iterable[Tensor | None], op: Op) -> Any:
    wanted = [inputs[i] for i in op.grads if isinstance(inputs[i], Tensor)]
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    return torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)


def _grad_outputs(outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Random gradients; zeros are quicker on real chips."""
    return [torch.randn_like(out) if out.requires_grad else None for out in outputs]


def _bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def _cache_and_free(device: torch.device) -> tuple[int, float]:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size, torch.cuda.mem_get_info(device)[0]
    return _CPU_CACHE, 4e9
