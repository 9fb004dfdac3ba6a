"""Levels and sizes are found in curves whose caches are known, and hidden from what finds them."""

from __future__ import annotations

import random
from math import exp

import pytest

from armillary.profiling.memory.plateaus import plateaus

KIB, MIB = 1 << 10, 1 << 20
HIERARCHIES = {
    "server, x86": ([(1.5, 32 * KIB), (5.2, 1 * MIB), (20.0, 36 * MIB)], 90.0),
    "desktop, x86": ([(1.0, 48 * KIB), (3.4, 2 * MIB), (14.0, 30 * MIB)], 75.0),
    "server, ARM": ([(1.3, 64 * KIB), (4.6, 1 * MIB), (33.0, 32 * MIB)], 110.0),
    "large L1 and L2, ARM": ([(0.9, 128 * KIB), (5.0, 12 * MIB)], 100.0),
    "a GPU, in ns": ([(17.0, 200 * KIB), (141.0, 24 * MIB), (240.0, 50 * MIB)], 345.0),
}


def curve(
    levels: list[tuple[float, int]], memory: float, seed: int, replacement: str, per_octave: int
) -> list[tuple[float, float]]:
    """Latencies of a chain of loads: beyond a cache, LRU keeps nothing of a cycle and random replacement keeps a share;
    a few per cent of noise, and now and then a point that something disturbed."""
    draw, points, size = random.Random(seed), [], 4.0 * KIB
    while size <= 512 * MIB:
        latency = memory
        for seconds, bytes_held in reversed(levels):
            over = size / bytes_held
            hits = 1.0 if over <= 1 else max(0.0, 1 - 4 * (over - 1)) if replacement == "lru" else over**-2.5
            latency = hits * seconds + (1 - hits) * latency
        disturbed = draw.uniform(1.3, 2.5) if draw.random() < 0.03 else 1.0
        points.append((size, latency * exp(draw.gauss(0, 0.02)) * disturbed))
        size *= 2 ** (1 / per_octave)
    return points


@pytest.mark.parametrize(
    ("name", "replacement"),
    [(name, how) for name in HIERARCHIES for how in ("lru", "random") if (name, how) != ("a GPU, in ns", "random")],
)  # half an octave under random replacement is one slope: nothing could tell a level from it
def test_sizes_and_latencies_are_those_of_the_hierarchy(name: str, replacement: str) -> None:
    levels, memory = HIERARCHIES[name]
    for seed in range(3):
        found = plateaus(curve(levels, memory, seed, replacement, 12 if "GPU" in name else 6))
        assert [each.bytes is None for each in found] == [False] * len(levels) + [True], f"{seed}: {found}"
        for each, (seconds, size) in zip(found, levels, strict=False):
            assert each.seconds == pytest.approx(seconds, rel=0.08)
            assert each.bytes == pytest.approx(size, rel=0.3)
        assert found[-1].seconds == pytest.approx(memory, rel=0.08)


def test_a_flat_curve_has_one_level() -> None:
    (only,) = plateaus([(float(4 * KIB << i), 1e-9) for i in range(12)])
    assert only.bytes is None and only.seconds == pytest.approx(1e-9)


def test_a_level_that_a_busy_machine_narrows_to_two_octaves_is_still_seen() -> None:
    sizes = [4 * KIB * 2 ** (i / 6) for i in range(100)]
    found = plateaus([(x, 1.5 if x < 33e3 else 5.2 if x < 1.1e6 else 16.0 if x < 4.4e6 else 66.0) for x in sizes])
    assert [round(each.seconds, 1) for each in found] == [1.5, 5.2, 16.0, 66.0]


def test_a_curve_that_still_rises_at_its_end_has_one_more_level_where_that_is_asked() -> None:
    """Page tables that fall out of cache after cache: the TLB before them has an end all the same."""
    flat = [(float(4096 << i), 2e-9 if i < 5 else 5e-9) for i in range(11)]
    rising = [(float(4096 << (11 + i)), 12e-9 * 1.5**i) for i in range(5)]
    assert [each.bytes is None for each in plateaus([*flat, *rising])] == [False, True]
    found = plateaus([*flat, *rising], rising=True)
    assert [each.bytes is None for each in found] == [False, False, True]
    assert found[1].seconds == pytest.approx(5e-9) and found[-1].seconds > 12e-9
    assert found[1].bytes == pytest.approx(4096 << 10, rel=1.0)
    assert len(plateaus(flat, rising=True)) == 2


def test_the_far_half_of_an_l2_is_a_level_though_memory_is_hardly_slower() -> None:
    """Loads from L2 on as measured on an H200: the step from its far half to memory is a fifth, between flat levels."""
    near, slope = [139] * 14, [173, 212]
    far = [246, 256, 256, 256, 256, 257, 266]
    memory = [311, 317, 314, 314, 311, 308, 308, 309, 309, 307, 305, 308, 307, 304, 303, 303, 304, 303, 301, 300, 303]
    latencies = [*near, *slope, *far, *memory]
    points = [(36.6e6 * 2 ** ((i - 16) / 8), latency * 1e-9) for i, latency in enumerate(latencies)]
    found = plateaus(points)
    assert [round(each.seconds * 1e9) for each in found] == [139, 256, 307]
    assert found[1].bytes == pytest.approx(60e6, rel=0.1)
    uneven = [(size, seconds * (0.96, 1.0, 1.04)[i % 3]) for i, (size, seconds) in enumerate(points)]
    assert len(plateaus(uneven)) == 2, "beside noise of a quarter of it the same step is none"
