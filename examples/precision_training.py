"""The network of the exercise on precision, and a training of it in one dtype: autocast, loss scaling, accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
