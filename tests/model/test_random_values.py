"""Random weights are a function of their position: parts equal the whole, on every machine and with any threads."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest
import torch

from armillary.model.random_values import Part, all_of, fill_normal, fill_uniform

GOLDEN = [-0.8886423707008362, -1.1412315368652344, -1.4538065195083618, 0.26625630259513855]
GOLDEN_UNIFORM = [0.44872772693634033, 0.16129934787750244]


def normal(*shape: int, seed: int = 1, name: str = "weight") -> torch.Tensor:
    full = torch.empty(shape)
    fill_normal(all_of(full), seed=seed, name=name, std=1.0)
    return full


@pytest.mark.parametrize("shape", [(1,), (70_001,), (37, 29), (3, 40_000), (5, 12, 7)], ids=str)
def test_a_part_is_that_part_of_the_full_tensor(shape: tuple[int, ...]) -> None:
    full, draw = normal(*shape), random.Random(0)
    for _ in range(8):
        offsets = tuple(draw.randrange(size) for size in shape)
        sizes = tuple(draw.randint(0, size - offset) for size, offset in zip(shape, offsets, strict=True))
        local = torch.empty(sizes)
        fill_normal(Part(local, offsets, shape), seed=1, name="weight", std=1.0)
        wanted = full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        assert torch.equal(local, wanted), (offsets, sizes)


def test_values_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Additions and multiplications round alike everywhere; a change here changes every model that starts anew."""
    assert normal(4, seed=0, name="embedding.weight").tolist() == GOLDEN
    uniform = torch.empty(2)
    fill_uniform(all_of(uniform), seed=0, name="a", bound=0.5)
    assert uniform.tolist() == GOLDEN_UNIFORM


def test_threads_and_dtype_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    one = normal(300, 301)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    half = torch.empty(300, 301, dtype=torch.bfloat16)
    fill_normal(all_of(half), seed=1, name="weight", std=1.0)
    assert torch.equal(one, normal(300, 301)) and torch.equal(half, one.bfloat16())


def test_they_are_normal_and_independent() -> None:
    x = normal(1000, 1000).double()
    for power, wanted, spread in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(x.pow(power).mean() - wanted) < 5 * (spread / x.numel()) ** 0.5, power
    ordered, exact = x.flatten().sort().values, NormalDist()
    shares = torch.tensor([exact.cdf(value) for value in ordered[::1000].tolist()])
    assert (shares - torch.arange(0, 1, 1e-3)).abs().max() < 2.5 / x.numel() ** 0.5  # Kolmogorov-Smirnov
    others = (normal(1000, 1000, name="other"), normal(1000, 1000, seed=2))
    products = [x[:, 1:] * x[:, :-1], x[1:] * x[:-1], *(x * other for other in others)]
    assert all(abs(pair.mean()) < 5 / pair.numel() ** 0.5 for pair in products)
    far = (x.abs() > 4.4).sum()  # beyond the cells that are interpolated
    assert 1 <= far < 40 and x.abs().max() < 6


def test_uniform_values_fill_their_bounds() -> None:
    x = torch.empty(100_000)
    fill_uniform(all_of(x), seed=1, name="a", bound=0.25)
    assert -0.25 < x.min() < -0.2499 and 0.2499 < x.max() < 0.25 and abs(x.mean()) < 0.003
