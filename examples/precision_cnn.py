"""FP32, FP16 and BF16 on a small CNN: images per second, peak memory, accuracy, and what the loss scaler did; then the
speed-up over batch sizes, and what the first epoch costs.

    python examples/precision_cnn.py               the GPU where there is one, else the CPU
    python examples/precision_cnn.py --device cpu  a minute or two on two cores
    python examples/precision_cnn.py --quick       a few steps only

It writes precision/table.md and three plots. The images are synthetic (digits.py), so nothing is downloaded;
precision_training.py has the network, precision_batches.py the batch sizes. docs/exercises/precision.md says what to
look at; `--page` with that file puts the result into it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from digits import digits
from exercise import finish, read_options, table
from precision_batches import SIZES, AtBatch, batch_table, over_batches
from precision_training import DTYPES, Settings, Training
from torch import Tensor

import armillary
from armillary.report.bars import series_bars
from armillary.report.charts import lines
from armillary.units import bytes_text

SETTINGS = {
    "quick": Settings(batch=16, steps=6, width=8, test=64, growth=2),
    "cpu": Settings(batch=64, steps=100, width=16, test=2000),
    "cuda": Settings(batch=1024, steps=300, width=128, test=10_000),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One precision."""

    name: str
    images_per_s: float
    peak_bytes: float
    accuracy: float
    losses: list[float]
    scales: list[float] = field(default_factory=list)
    """of every step, fp16 only"""
    skipped: list[int] = field(default_factory=list)
    """steps whose gradients overflowed and were thrown away"""
    vanished: tuple[float, float] | None = None
    """share of gradients that are 0 in fp16, at scale 1 and at the scale it ended with"""


class TrainingRun:
    """The training run of one precision, and what its steps measured."""

    def __init__(self, name: str, settings: Settings, device: torch.device, data: tuple[Tensor, Tensor]) -> None:
        self.name, self.settings, self.device = name, settings, device
        self.training = Training(name, settings, device, data)
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.seconds: list[float] = []

    def step(self, step: int) -> None:
        before = self.training.scaler.get_scale()
        begin = time.perf_counter()
        self.losses.append(float(self.training.step(step)))  # float() waits for the device
        self.seconds.append(time.perf_counter() - begin)
        self.scales.append(before)
        if self.training.scaler.get_scale() < before:
            self.skipped.append(step)

    def result(self, test: tuple[Tensor, Tensor]) -> Result:
        training, scaled, accuracy = self.training, self.name == "fp16", self.training.accuracy(*test)
        settled = self.seconds[len(self.seconds) // 5 :]
        return Result(
            name=self.name,
            images_per_s=self.settings.batch / statistics.median(settled),
            peak_bytes=peak(lambda: training.step(self.settings.steps), self.device),
            accuracy=accuracy,
            losses=self.losses,
            scales=self.scales if scaled else [],
            skipped=self.skipped if scaled else [],
            vanished=(zeros(training, 1.0), zeros(training, training.scaler.get_scale())) if scaled else None,
        )


def measure(
    settings: Settings, device: torch.device, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> list[Result]:
    """Every precision; on a CPU they take turns, step by step, so that what else it does slows all alike. On a GPU one
    after the other: its peak memory is that of all tensors there are."""
    if device.type == "cpu":
        courses = [TrainingRun(name, settings, device, train) for name in DTYPES]
        for step in range(settings.steps):
            for course in courses:
                course.step(step)
        return [course.result(test) for course in courses]
    results = []
    for name in DTYPES:
        course = TrainingRun(name, settings, device, train)
        for step in range(settings.steps):
            course.step(step)
        results.append(course.result(test))
    return results


def peak(step: Callable[[], object], device: torch.device) -> float:
    """Bytes of all tensors at the fullest moment of a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated())
    found = armillary.profile(step, steps=1, warmup=1).memory
    return found.peak_bytes if found else float("nan")


def zeros(training: Training, scale: float) -> float:
    """Share of the gradients that reach the first convolution's output and are 0: too small for fp16 at this scale."""
    seen: list[Tensor] = []
    handle = training.model[0].register_forward_hook(lambda _, __, out: out.register_hook(seen.append) and None)
    (training.loss(*training.batch(0)) * scale).backward()
    handle.remove()
    training.optimizer.zero_grad()
    return float((seen[0] == 0).float().mean())


# --- tell


def precision_table(results: Sequence[Result]) -> str:
    base = results[0]
    rows = [
        (
            one.name,
            f"{one.images_per_s:,.0f}",
            f"{one.images_per_s / base.images_per_s:.2f} ×",
            bytes_text(one.peak_bytes),
            f"{one.peak_bytes / base.peak_bytes:.2f} ×",
            f"{100 * one.accuracy:.1f} %",
        )
        for one in results
    ]
    return table(("precision", "images/s", "against fp32", "peak memory", "against fp32", "accuracy"), rows)


def scaler_words(result: Result) -> list[str]:
    """What the loss scaler did, in a few lines."""
    skipped = ", ".join(map(str, result.skipped[:8])) + (" …" if len(result.skipped) > 8 else "")
    grown = sum(after > before for before, after in zip(result.scales, result.scales[1:], strict=False))
    lines = [
        f"loss scaler: {power(result.scales[0])} → {power(result.scales[-1])} over {len(result.scales)} steps; "
        f"{len(result.skipped)} steps overflowed and were skipped ({skipped or 'none'}), {grown} times it doubled",
    ]
    if result.vanished:
        bare, scaled = (100 * share for share in result.vanished)
        lines.append(
            f"gradients of the first convolution that are 0 in fp16: {bare:.1f} % at scale 1, {scaled:.1f} % "
            f"at {power(result.scales[-1])}"
        )
    return lines


def power(scale: float) -> str:
    return f"2^{torch.tensor(scale).log2().item():.0f}"


# --- plots


def rate_bars(sizes: Sequence[AtBatch]) -> str:
    rows = [
        (f"batch {batch}", [each.images_per_s for each in sizes if each.batch == batch])
        for batch in dict.fromkeys(each.batch for each in sizes)
    ]
    label = "Images per second by batch size and precision"
    return series_bars(rows, tuple(DTYPES), label=label, text=lambda x: f"{x:,.0f} images/s")


def loss_lines(results: Sequence[Result]) -> str:
    series = [(f"{one.name}: {100 * one.accuracy:.1f} % right", list(enumerate(smooth(one.losses)))) for one in results]
    return lines(series, label="Loss by step", x_name="step (loss, mean of 10 steps)")


def scale_line(results: Sequence[Result]) -> str:
    """The exponent of the loss scale, and the steps that overflowed."""
    (one,) = (each for each in results if each.scales)
    exponents = [(float(step), torch.tensor(scale).log2().item()) for step, scale in enumerate(one.scales)]
    marks = [(float(step), "") for step in one.skipped]
    label = "Scale of the loss in fp16 by step"
    about = "step (exponent of the loss scale; dashed: an overflow, the step is skipped)"
    return lines([("fp16", exponents)], label=label, x_name=about, marks=marks, above=10.0)


def smooth(values: Sequence[float], over: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - over + 1) : i + 1]) for i in range(len(values))]


OWN = {
    "device": {"help": "cpu or cuda"},
    "steps": {"type": int, "help": "training steps of each precision"},
}


def main() -> None:
    options = read_options("precision", __doc__, OWN)
    cuda = torch.cuda.is_available() and not options.quick
    device = torch.device(options.own["device"] or ("cuda" if cuda else "cpu"))
    kind = "quick" if options.quick else device.type
    settings = replace(SETTINGS[kind], steps=options.own["steps"] or SETTINGS[kind].steps)
    count = min(max(settings.batch * settings.steps, *SIZES[kind].batches), 20_000)
    train, test = (_on(device, digits(number, seed=seed)) for number, seed in ((count, 1), (settings.test, 2)))
    print(f"{settings.steps} steps of {settings.batch} pictures on {device.type} …", flush=True)
    results = measure(settings, device, train, test)
    print("batch sizes …", flush=True)
    sizes = over_batches(SIZES[kind], settings, device, train)
    words = [precision_table(results), "", *(line for one in results if one.scales for line in scaler_words(one))]
    words += ["", f"Epochs of {SIZES[kind].steps} steps at other batch sizes:", "", batch_table(sizes)]
    more = (
        (loss_lines(results), "loss by step"),
        (scale_line(results), "scale of the loss in fp16, and the steps that overflowed"),
    )
    finish(options, "\n".join(words), rate_bars(sizes), "images per second by batch size", *more)


def _on(device: torch.device, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = parts
    return images.to(device), labels.to(device)


if __name__ == "__main__":
    main()
