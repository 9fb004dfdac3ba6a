"""Who multiplies what: every step once, nobody waits for one who waits, and all end together."""

from __future__ import annotations

import pytest

from armillary.kernels.gemm.stream_schedule import Grid, Segment, grid_of, level, schedule, table

SHAPES = {
    "odd": (5000, 7000, 3000),
    "whole rounds": (192 * 12, 256 * 22, 640),
    "one tile": (5, 8, 8),
    "less than a round": (1000, 776, 4096),
    "few steps": (5000, 7000, 100),
    "much to share": (4096, 4096, 14336),
}


def planned(name: str, programs: int = 132) -> tuple[Grid, list[list[Segment]]]:
    grid = grid_of(*SHAPES[name], (192, 256, 64), 3, 16)
    return grid, schedule(grid, programs)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_step_of_every_tile_is_done_once(name: str) -> None:
    grid, segments = planned(name)
    done = [(p.row, p.column, step) for own in segments for p in own for step in range(p.first, p.last)]
    assert len(done) == len(set(done)) == grid.tiles * grid.steps


@pytest.mark.parametrize("name", list(SHAPES))
def test_who_is_waited_for_does_not_wait_before(name: str) -> None:
    """A helper leaves its sums before its program waits for anybody; each slot is filled once and read once."""
    _, segments = planned(name)
    filled, read = [], []
    for own in segments:
        waits = [i for i, segment in enumerate(own) if segment.helpers > 0]
        for i, segment in enumerate(own):
            if segment.helpers < 0:
                filled.append(segment.slot)
                assert all(i < each for each in waits) and segment.first > 0
            else:
                assert segment.first == 0
                read += range(segment.slot, segment.slot + segment.helpers)
    assert sorted(filled) == sorted(read) == list(range(len(filled)))
    slots = {(p.row, p.column): p for own in segments for p in own if p.helpers > 0}
    for own in segments:
        for segment in own:
            if segment.helpers < 0:
                owner = slots[segment.row, segment.column]
                assert owner.slot <= segment.slot < owner.slot + owner.helpers


def test_all_end_together() -> None:
    """756 tiles on 132 multiprocessors are six rounds; shared out, five and two thirds."""
    grid, segments = planned("odd")
    assert grid.tiles == 756 and grid.steps == 47 and grid.last_cost == 0.5
    taken = [
        sum((p.last - p.first) * (grid.last_cost if p.row == grid.rows - 1 else 1.0) for p in own) for own in segments
    ]
    assert max(taken) <= sum(taken) / len(taken) + 4 < 6 * 47 - 12


def test_the_table_says_where_a_program_ends() -> None:
    rows, slots = table(planned("odd")[1])
    assert slots == sum(row[4] < 0 for own in rows for row in own)
    for own in rows:
        count = own[0][5]
        assert all(row[2] > row[1] for row in own[:count]) and own[count] == [0] * 6


def test_levels() -> None:
    assert level([0.0, 0.0], 6.0) == 3.0
    assert level([1.0, 5.0, 2.0], 3.0) == 3.0  # 2 into the first, 1 into the last
    assert level([4.0], 1.0) == 5.0
