"""Where the time of an engine's steps goes: the host's parts, what it waits for the device, and the device's kernels.

`StepTimes` puts clocks around the parts of a loop; `top_kernels` records a few steps with torch's profiler, graphs
included; `timeline` lists the kernels of one replay in order, and the mean of those that repeat with every layer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from armillary.engine.engine import Engine

PARTS = ("schedule", "encode", "run", "wait", "update", "answers")


class StepTimes:
    """Seconds of every part of every step since `clear`."""

    def __init__(self, engine: Engine) -> None:
        loop, executor = engine.loop, engine.loop.executor
        self.spent: dict[str, float] = defaultdict(float)
        self.steps: list[tuple[int, bool, float]] = []
        """tokens of each step, whether it only decodes, and when it was decided"""
        loop.scheduler.schedule = self._noted(loop.scheduler.schedule)  # type: ignore[method-assign]
        loop.scheduler.update = self._timed("update", loop.scheduler.update)  # type: ignore[method-assign]
        executor.encoder.encode = self._timed("encode", executor.encoder.encode)  # type: ignore[attr-defined]
        executor.run = self._timed("run", executor.run)  # type: ignore[attr-defined]
        executor.tokens = self._timed("wait", executor.tokens)  # type: ignore[method-assign]
        engine.output_processor.take = self._timed("answers", engine.output_processor.take)  # type: ignore[method-assign]

    def clear(self) -> None:
        self.spent.clear()
        self.steps.clear()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args, **named)
            self.spent[name] += time.perf_counter() - begin
            return found

        return timed

    def _noted(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        inner = self._timed("schedule", schedule)

        def noted(now: float) -> Any:
            decision = inner(now)
            self.steps.append((decision.num_tokens, not decision.chunks, time.perf_counter()))
            return decision

        return noted

    def text(self) -> dict[str, Any]:
        """Mean microseconds a step of every part, and step times by batch."""
        count = max(1, len(self.steps))
        host = {name: round(self.spent[name] / count * 1e6) for name in PARTS}
        found: dict[str, list[float]] = defaultdict(list)
        for (tokens, decodes, begin), (_, _, end) in zip(self.steps, self.steps[1:], strict=False):
            found[_bucket(tokens, decodes)].append(end - begin)
        order = sorted(found, key=lambda name: (name[0], int(name.split("≤")[1])))
        return {
            "us_a_step": host,
            "step_ms": {
                name: f"{1e3 * sum(found[name]) / len(found[name]):.2f} × {len(found[name])}" for name in order
            },
        }


def _bucket(tokens: int, decodes: bool) -> str:
    if not decodes:
        return f"mixed ≤{1 << max(0, tokens - 1).bit_length()}"
    return f"decodes ≤{-(-tokens // 32) * 32}"


def top_kernels(step: Callable[[], Any], count: int, *, most: int = 14) -> dict[str, Any]:
    """Kernels of `count` steps: microseconds and launches a step, the largest first."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    plain_s = (time.perf_counter() - begin) / count
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = spent[_short(event.name)]
            entry[0] += event.time_range.elapsed_us() / count
            entry[1] += 1 / count
    order = sorted(spent, key=lambda name: -spent[name][0])
    kernels = {name: f"{spent[name][0]:.1f} µs / {spent[name][1]:.4g}" for name in order[:most]}
    total = sum(entry[0] for entry in spent.values())
    return {
        "step_us": round(plain_s * 1e6),
        "kernels_us": round(total),
        "launches": round(sum(entry[1] for entry in spent.values())),
        "top": kernels,
    }


def timeline(replay: Callable[[], Any], marker: str = "decode") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kernels of one replay in order, and the means of a cycle from `marker` to `marker`: name, microseconds it ran,
    those from the end of what ended last before it to its own end (`added`: these add up to the whole), and those
    from that end to its begin (`gap`; below zero where it was set up early)."""
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        replay()
        torch.cuda.synchronize()
    device = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    device.sort(key=lambda event: event.time_range.end)
    rows, ended = list[dict[str, Any]](), device[0].time_range.start if device else 0.0
    for event in device:
        begin, end = event.time_range.start, event.time_range.end
        rows.append({"name": _short(event.name), "ran": end - begin, "added": end - ended, "gap": begin - ended})
        ended = end
    at = [i for i, row in enumerate(rows) if row["name"] == marker]
    period = at[1] - at[0] if len(at) > 1 else 0
    cycles = [rows[i : i + period] for i in at[1:-1]]
    means = (
        [
            {"name": cycles[0][place]["name"]}
            | {
                key: round(sum(cycle[place][key] for cycle in cycles) / len(cycles), 2)
                for key in ("ran", "added", "gap")
            }
            for place in range(period)
        ]
        if cycles
        else []
    )
    return rows, means


def _short(name: str) -> str:
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name[:44]
