"""The time of a version for a case, forward and backward separately, on inputs that are not in a cache.

Several sets of random inputs, together several times the last cache, are cycled through. On a GPU the forward passes of
all sets are captured in one CUDA graph and their backward passes in a second, so that the device is timed and not the
CPU.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.agreement import as_tuple, gradients, with_grad
from armillary.kernels.core.op import Case, Op
from armillary.kernels.core.requirements import LOG
from armillary.kernels.core.timing import time_calls, warm_up

ONE_CALL = "one call"
_TIMES_CACHE = 4
_CPU_CACHE = 8 << 20
_MAX_SETS = 64
_SHORT_S = 0.02  # a call that takes less is timed properly in any case: the CPU's clock includes its launch
_GRAPH_S, _MAX_GRAPH_CALLS = 2e-3, 256  # shortest graph of forward passes, and the most calls put in to reach it
_SHARE_OF_MEMORY = 0.2  # of free memory that inputs may take; outputs and gradients need as much again or more


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one call."""

    forward_s: float  # including what it saves for the backward pass
    backward_s: float | None = None  # None for an op without a backward pass
    method: str = ""

    @property
    def seconds(self) -> float:
        return self.forward_s + (self.backward_s or 0.0)


def input_sets(op: Op, case: Case) -> list[tuple[Any, ...]]:
    """Enough sets of random inputs that none is still in a cache when it is used again."""
    device = torch.device(case.device)
    generator = torch.Generator(device).manual_seed(0)
    first = op.inputs(case, generator)
    size = max(1, sum(x.numel() * x.element_size() for x in first if isinstance(x, Tensor)))
    cache, free = _CPU_CACHE, 4e9
    if device.type == "cuda":
        cache, free = torch.cuda.get_device_properties(device).L2_cache_size, torch.cuda.mem_get_info(device)[0]
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
    """Time `run`, version `name`, on these sets for about `budget_s` per direction; `rest_s` as in time_calls. A call
    that takes longer than `hopeless_s`, and is not short, is timed once."""
    device = next(x.device for x in sets[0] if isinstance(x, Tensor))
    leaves = [with_grad(inputs, op.grads) for inputs in sets]
    run_once(run, op, leaves[0])
    once = _one_call(run, op, leaves[-1], device) if hopeless_s < inf else None
    if once is not None and once.seconds > max(hopeless_s, _SHORT_S):
        return once
    limits = {"budget_s": budget_s, "rest_s": rest_s}
    if device.type == "cuda":
        why = waits_for_device(lambda: run_once(run, op, leaves[0]))
        try:
            if not why:
                return _captured(run, op, leaves, device, limits)
        except RuntimeError as error:
            why = first_line(error)
        what = f"{op.name}, {name}" if name else op.name
        LOG.warning("%s: not captured in a CUDA graph, timed call by call: %s", what, why)
        torch.cuda.synchronize(device)
    return _called(run, op, leaves, device, limits)


def first_line(error: Exception, otherwise: str = "") -> str:
    return (str(error).strip().splitlines() or [otherwise])[0]


def run_once(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...]) -> None:
    """A forward pass, and a backward pass where the op has one."""
    leaves = with_grad(inputs, op.grads)
    with torch.set_grad_enabled(bool(op.grads)):
        outputs = as_tuple(run(*leaves))
        gradients(leaves, outputs, _grad_outputs(outputs), op.grads)


def _one_call(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...], device: Any) -> Times:
    """One forward and one backward pass by the CPU's clock."""
    marks = []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    with torch.set_grad_enabled(bool(op.grads)):
        mark()
        outputs = as_tuple(run(*inputs))
        mark()
        grads = _grad_outputs(outputs)
        mark()
        gradients(inputs, outputs, grads, op.grads)
        mark()
    backward_s = marks[3] - marks[2] if op.grads else None
    return Times(forward_s=marks[1] - marks[0], backward_s=backward_s, method=ONE_CALL)


def _captured(
    run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]], device: Any, limits: dict[str, float]
) -> Times:
    def run_some() -> None:
        for inputs in leaves[:2]:
            run_once(run, op, inputs)

    warm_up(run_some, device)
    repeated = leaves * _repeats(run, op, leaves)
    forward, outputs = _forward_graph(run, op, repeated)
    times = [time_calls([lambda: forward.replay()], device, **limits, graph=False).seconds]
    if op.grads:
        grad_outputs = [_grad_outputs(each) for each in outputs]
        backward, results = torch.cuda.CUDAGraph(), []
        with capturing(backward, forward.pool()):
            results = [gradients(*each, op.grads) for each in zip(repeated, outputs, grad_outputs, strict=True)]
        times.append(time_calls([lambda: backward.replay()], device, **limits, graph=False).seconds)
        del results
    forward_s, *rest = (seconds / len(repeated) for seconds in times)
    return Times(forward_s=forward_s, backward_s=rest[0] if rest else None, method="CUDA graph")


def _forward_graph(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
    """The forward passes of these inputs in one graph, and their outputs."""
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.set_grad_enabled(bool(op.grads)), capturing(graph, torch.cuda.graph_pool_handle()):
        outputs = [as_tuple(run(*inputs)) for inputs in leaves]
    return graph, outputs


def _repeats(run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]]) -> int:
    """How often all sets go into one graph: a graph launch takes microseconds, which a long graph hides."""
    graph, outputs = _forward_graph(run, op, leaves)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    del outputs
    wanted = ceil(_GRAPH_S / max(1e-6, begin.elapsed_time(end) / 1e3))
    return max(1, min(wanted, _MAX_GRAPH_CALLS // len(leaves)))


def _called(
    run: Callable[..., Any], op: Op, leaves: list[tuple[Any, ...]], device: Any, limits: dict[str, float]
) -> Times:
    """Without a graph: forward alone, then both, and the difference."""
    with torch.set_grad_enabled(bool(op.grads)):
        forward = time_calls([partial(run, *inputs) for inputs in leaves], device, **limits, graph=False)
        method = f"calls, {forward.method}"
        if not op.grads:
            return Times(forward_s=forward.seconds, method=method)
        grads = _grad_outputs(as_tuple(run(*leaves[0])))
        both = time_calls([partial(_both, run, op, inputs, grads) for inputs in leaves], device, **limits, graph=False)
    return Times(forward_s=forward.seconds, backward_s=max(0.0, both.seconds - forward.seconds), method=method)


def _both(run: Callable[..., Any], op: Op, inputs: tuple[Any, ...], grads: list[Tensor | None]) -> Any:
    return gradients(inputs, as_tuple(run(*inputs)), grads, op.grads)


def _grad_outputs(outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Random gradients; zeros are faster on real chips."""
    return [torch.randn_like(out) if out.requires_grad else None for out in outputs]


# --- CUDA graphs


def waits_for_device(call: Callable[[], object]) -> str:
    """How a call synchronises with the device, which no capture allows; '' if it does not."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return first_line(error, "it waits for the device")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """torch.cuda.graph that restores stream and memory pool if the capture fails.

    When the end of a capture fails, torch leaves the capture's stream as the current one, and its memory pool as the
    place of all further allocations, which nothing ever frees.
    """
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except RuntimeError:
        torch.cuda.set_stream(stream)
        _release(stream.device, pool)
        raise


def _release(device: torch.device, pool: Any) -> None:
    """Stop allocating in the pool of a capture that did not end; one that did releases it by itself."""
    assert device.index is not None
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is None or release is None:  # a torch that keeps them elsewhere: memory stays taken, no more than that
        return
    try:
        end(device.index, pool)
    except RuntimeError:  # nothing is allocated there: the capture had ended
        return
    release(device.index, pool)
