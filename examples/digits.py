"""Synthetic images of digits: a 5 × 7 font, rotated, sheared, scaled and shifted at random, with noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .##..
"""


def digits(count: int, *, size: int = 32, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(images [count, 1, size, size], labels [count]); the same ones for the same seed."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=random)
    plain = F.pad(_glyphs()[labels], (4, 4, 3, 3))
    grid = F.affine_grid(_moves(count, random), [count, 1, size, size], align_corners=False)
    images = F.grid_sample(plain, grid, align_corners=False)
    ink = 0.5 + torch.rand(count, 1, 1, 1, generator=random)
    return ink * images + noise * torch.randn(images.shape, generator=random), labels


def _glyphs() -> Tensor:
    rows = [line.split() for line in _FONT.split("\n") if line]
    return torch.tensor([[[float(dot == "#") for dot in row[digit]] for row in rows] for digit in range(10)])[:, None]


def _moves(count: int, random: torch.Generator) -> Tensor:
    """Affine maps [count, 2, 3]: up to 0.35 rad of turn, 0.2 of shear, 0.8 to 1.25 of size, 0.2 of shift."""

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=random)

    turn, shear, scale = between(-0.35, 0.35), between(-0.2, 0.2), between(0.8, 1.25)
    cos, sin = turn.cos() * scale, turn.sin() * scale
    first = torch.stack([cos, -sin + shear, between(-0.2, 0.2)], dim=1)
    return torch.stack([first, torch.stack([sin, cos, between(-0.2, 0.2)], dim=1)], dim=1)
