"""ResNet-50 (He et al., 2015) in plain torch, for the profiling exercise; the stride is on the 3×3 convolution."""

from __future__ import annotations

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up by four, around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            down = nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(down, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, a mean over the image and a classifier."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        inside, stages = 64, []
        for number, depth in enumerate(depths):
            width = 64 * 2**number
            blocks = [Bottleneck(inside, width, 1 if number == 0 else 2)]
            blocks += [Bottleneck(4 * width, width, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inside = 4 * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet50() -> ResNet:
    return ResNet()
