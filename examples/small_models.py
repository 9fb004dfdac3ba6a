"""Two small models to serve: a wide MLP, which is memory-bound for a single row, and a ResNet for 16 × 16 images.

armillary convert examples/small_models.py:resnet resnet.pt2 --to pt2
armillary serve resnet.pt2
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Classifier(nn.Sequential):
    """Layers with an example of what they take, which the export reads."""

    def __init__(self, *layers: nn.Module, example: Tensor) -> None:
        super().__init__(*layers)
        self.example_inputs = (example,)


class Residual(nn.Module):
    """Two 3 × 3 convolutions around a shortcut (He et al., 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if inside != outside:
            down = nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(down, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm_one(self.one(x)))
        return torch.relu(self.norm_two(self.two(y)) + self.shortcut(x))


def mlp(width: int = 4096, depth: int = 3, features: int = 64, classes: int = 10) -> Classifier:
    """64 features, three hidden layers of 4096, 10 classes: 34 M weights."""
    torch.manual_seed(0)
    sizes = [features, *[width] * depth]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Classifier(*hidden, nn.Linear(width, classes), example=torch.zeros(2, features))


def resnet(width: int = 16, blocks: int = 3, pixels: int = 16, classes: int = 10) -> Classifier:
    """ResNet-20: three stages of three blocks, 0.27 M weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage in range(3):
        for block in range(blocks):
            outside = width * 2**stage
            layers.append(Residual(inside, outside, 2 if stage and not block else 1))
            inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes)]
    return Classifier(*layers, example=torch.zeros(2, 3, pixels, pixels))
