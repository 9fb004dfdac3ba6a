"""FP32, FP16 and BF16 on a small CNN: images per second, peak memory, accuracy, and what the loss scaler did.

    python examples/precision_cnn.py               the GPU where there is one, else the CPU
    python examples/precision_cnn.py --device cpu  a few minutes on two cores
    python examples/precision_cnn.py --quick       a few steps only

It writes precision/table.md and precision/plot.png. The images are synthetic (digits.py), so nothing is downloaded;
docs/exercises/precision.md says what to look at; `--page` with that file puts the result of a CPU into it.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digits import digits
from torch import Tensor, nn

import armillary
from armillary.machine.machine import machine
from armillary.units import bytes_text

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEADING = "## What it printed on a CPU"
FIRST_SCALE = 2.0**24
"""higher than anybody would start: the first steps overflow, and the scaler comes down"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is trained."""

    batch: int
    steps: int
    width: int
    """channels of the first convolution"""
    test: int
    """pictures that accuracy is measured on"""
    growth: int = 20
    """steps without overflow after which the scale doubles"""


SETTINGS = {
    "quick": Settings(batch=16, steps=6, width=8, test=64, growth=2),
    "cpu": Settings(batch=64, steps=150, width=16, test=2000),
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


class Conv(nn.Conv2d):
    """A convolution. On a CPU in fp16 its weight gradient is made in fp32: the library there has no fast one, it is
    hundreds of times slower, and then the exercise would be about that alone."""

    def forward(self, images: Tensor) -> Tensor:
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16
        if images.device.type != "cpu" or not half:
            return super().forward(images)
        out: Tensor = _Fp16Conv.apply(images.half(), self.weight.half(), self.stride, self.padding)
        return out + self.bias.half()[:, None, None]


class _Fp16Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return torch.conv2d(images, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def back(*tensors: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
            return torch.ops.aten.convolution_backward(
                *tensors, None, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
            )

        images, weight = ctx.saved_tensors
        to_images = back(grad, images, weight, wanted=[True, False, False])[0] if ctx.needs_input_grad[0] else None
        to_weight = back(grad.float(), images.float(), weight.float(), wanted=[False, True, False])[1]
        return to_images, to_weight.half(), None, None


def cnn(width: int) -> nn.Sequential:
    """Three stages of two convolutions each, halving the picture and doubling the channels."""
    layers: list[nn.Module] = []
    inside = 1
    for stage in range(3):
        outside = width * 2**stage
        for stride in (2 if stage else 1, 1):
            layers += [Conv(inside, outside, 3, stride=stride, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


class Training:
    """A model, its optimiser and its scaler in one precision; `step(n)` trains on batch n."""

    def __init__(self, name: str, settings: Settings, device: torch.device, data: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)  # every precision begins with the same weights
        self.dtype, self.device, self.settings = DTYPES[name], device, settings
        self.model = cnn(settings.width).to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=FIRST_SCALE, growth_interval=settings.growth, enabled=name == "fp16"
        )
        self.images, self.labels = data

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        size = self.settings.batch
        first = step * size % (len(self.images) - size + 1)
        return self.images[first : first + size], self.labels[first : first + size]

    def step(self, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * max(0.0, 1 - step / self.settings.steps)
        loss = self.loss(*self.batch(step))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)  # left out where a gradient is infinite or not a number
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            right = [
                (self.model(part).argmax(1) == want).sum()
                for part, want in zip(images.split(500), labels.split(500), strict=True)
            ]
        self.model.train()
        return float(sum(right)) / len(labels)  # type: ignore[arg-type]


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


def table(results: list[Result]) -> str:
    base = results[0]
    lines = [
        "| precision | images/s | against fp32 | peak memory | against fp32 | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {one.images_per_s:,.0f} | {one.images_per_s / base.images_per_s:.2f} × | "
            f"{bytes_text(one.peak_bytes)} | {one.peak_bytes / base.peak_bytes:.2f} × | {100 * one.accuracy:.1f} % |"
        )
    return "\n".join(lines)


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


def plot(results: list[Result], path: Path) -> str:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: pip install matplotlib"
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    names, colours = [one.name for one in results], ["tab:blue", "tab:orange", "tab:green"]
    axes[0, 0].bar(names, [one.images_per_s for one in results], color=colours)
    axes[0, 0].set_title("images per second")
    axes[0, 1].bar(names, [one.peak_bytes / 1e6 for one in results], color=colours)
    axes[0, 1].set_title("peak memory, MB")
    for one, colour in zip(results, colours, strict=True):
        axes[1, 0].plot(smooth(one.losses), color=colour, label=f"{one.name}: {100 * one.accuracy:.1f} % right")
    axes[1, 0].set(title="loss (mean of 10 steps)", xlabel="step", yscale="log")
    axes[1, 0].legend()
    for one in results:
        if one.scales:
            axes[1, 1].step(range(len(one.scales)), one.scales, where="post", color="tab:orange", label="scale")
            lost = [one.scales[step] for step in one.skipped]
            axes[1, 1].plot(one.skipped, lost, "rx", label="overflow: step skipped")
    axes[1, 1].set(title="what the loss scaler did (fp16)", xlabel="step")
    axes[1, 1].set_yscale("log", base=2)
    axes[1, 1].legend()
    figure.savefig(path, dpi=80)
    return str(path)


def smooth(values: list[float], over: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - over + 1) : i + 1]) for i in range(len(values))]


def put_into(page: Path, words: list[str], plotted: str) -> None:
    """The end of the guide, from its last heading on, becomes this run."""
    image = page.parent / "images" / "precision.png"
    if Path(plotted).is_file():
        image.parent.mkdir(exist_ok=True)
        shutil.copy(plotted, image)
    cpu = machine().cpu
    said = (
        f"{datetime.date.today()} · {cpu.usable} cores of {cpu.model} · torch {torch.__version__} · "
        "`python examples/precision_cnn.py --device cpu`:"
    )
    lines = [page.read_text().partition(HEADING)[0].rstrip(), "", HEADING, "", said, "", *words]
    if image.is_file():
        lines += ["", f"![speed, memory, loss and scale](images/{image.name})"]
    page.write_text("\n".join(lines) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="a few steps on the CPU")
    options.add_argument("--device", help="cpu or cuda")
    options.add_argument("--steps", type=int, help="training steps of each precision")
    options.add_argument("--out", type=Path, default=Path("precision"), help="folder for table and plot")
    options.add_argument("--page", type=Path, help="guide whose last section becomes this run")
    quick, wanted, steps, out, page = vars(options.parse_args()).values()
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() and not quick else "cpu"))
    settings = SETTINGS["quick" if quick else device.type]
    settings = Settings(**{**vars(settings), "steps": steps or settings.steps})
    count = min(settings.batch * settings.steps, 20_000)
    train, test = (
        tuple(part.to(device) for part in digits(number, seed=seed))
        for number, seed in ((count, 1), (settings.test, 2))
    )
    print(f"{settings.steps} steps of {settings.batch} pictures on {device.type} …")
    results = measure(settings, device, train, test)  # type: ignore[arg-type]
    words = [table(results), "", *(line for one in results if one.scales for line in scaler_words(one))]
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(words) + "\n")
    print("\n".join(words))
    plotted = plot(results, out / "plot.png")
    print(f"\ntable: {out / 'table.md'} · plot: {plotted}")
    if page is not None:
        put_into(page, words, plotted)


if __name__ == "__main__":
    main()
