"""Who multiplies what in a GEMM whose last round of tiles would leave multiprocessors idle (stream-K).

Whole rounds of output tiles go to the programs in turn. What is left over is one line of steps over the inputs, tile
after tile, and each program takes a stretch of it. A tile in several stretches belongs to the program that has its
first steps, which comes to it last; the others leave their sums in memory, as the first of what is left over that they
do. So nobody waits for one who waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from armillary.kernels.core.launch import ceil_div

COLUMNS_MOST = 1 << 14  # of output tiles
LEAST_STEPS = 4
"""steps over the inputs that are worth a segment of their own: leaving its sums in memory costs about as much"""
LEAST_COST = 0.5
"""of a step whose tile has few rows, relative to a full one: the weight's tile is read all the same. Not measured"""


@dataclass(frozen=True)
class Segment:
    """Steps first … last − 1 of an output tile."""

    row: int
    column: int
    first: int
    last: int
    slot: int = 0  # where sums are left; of a tile's first segment, where those of the others begin
    helpers: int = 0  # segments of the same tile after this one; −1: this is such a segment


@dataclass(frozen=True)
class Grid:
    """Output tiles in the order in which they are visited: `group` rows of tiles at a time, column by column."""

    rows: int  # of tiles
    columns: int
    steps: int  # over the inputs
    group: int
    last_cost: float = 1.0  # of a step of the last row of tiles

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def at(self, tile: int) -> tuple[int, int]:
        first = tile // (self.group * self.columns) * self.group
        rows, inside = min(self.rows - first, self.group), tile % (self.group * self.columns)
        return first + inside % rows, inside // rows

    def cost(self, tile: int) -> float:
        """Of one step."""
        return self.last_cost if self.at(tile)[0] == self.rows - 1 else 1.0


def grid_of(M: int, N: int, K: int, tile: tuple[int, int, int], parts: int, group: int) -> Grid:
    """`tile`: rows, columns, inputs of a step; its rows are divided among `parts`, and those without any do nothing."""
    rows, columns, inner = tile
    live = ceil_div(M - (ceil_div(M, rows) - 1) * rows, rows // parts)
    cost = 1.0 if live == parts else max(LEAST_COST, live / parts)
    return Grid(ceil_div(M, rows), ceil_div(N, columns), ceil_div(K, inner), group, cost)


def schedule(grid: Grid, programs: int) -> list[list[Segment]]:
    """The segments of each program, in order."""
    full_tiles = grid.tiles // programs * programs
    own = [
        [Segment(*grid.at(tile), 0, grid.steps) for tile in range(program, full_tiles, programs)]
        for program in range(programs)
    ]
    if (grid.tiles - full_tiles) * grid.steps < 2 * LEAST_STEPS * programs:  # too little for all to have a share
        for program, tile in enumerate(range(full_tiles, grid.tiles)):
            own[program].append(Segment(*grid.at(tile), 0, grid.steps))
    else:
        busy = [sum(grid.cost(tile) * grid.steps for tile in range(p, full_tiles, programs)) for p in range(programs)]
        cut: dict[int, list[tuple[int, int, int]]] = {}
        for program, tile, first, last in stretches(grid, full_tiles, busy):
            cut.setdefault(tile, []).append((program, first, last))
        slot = 0
        for tile, segments in cut.items():
            for i, (program, first, last) in enumerate(segments):
                helpers = -1 if i else len(segments) - 1
                own[program].append(Segment(*grid.at(tile), first, last, slot + max(0, i - 1), helpers))
            slot += len(segments) - 1
    return own


def stretches(grid: Grid, begin: int, busy: list[float]) -> Iterator[tuple[int, int, int, int]]:
    """(program, tile, first step, last step) from tile `begin` on, so that programs that are `busy` for different
    times end together."""
    left = sum(grid.cost(tile) * grid.steps for tile in range(begin, grid.tiles))
    end = level(busy, left)
    tile, step, given, wanted = begin, 0, 0.0, 0.0
    for program, before in enumerate(busy):
        wanted += max(0.0, end - before)  # by this program and those before it
        while tile < grid.tiles:
            cost, rest = grid.cost(tile), grid.steps - step
            take = rest if program == len(busy) - 1 else round((wanted - given) / cost)
            if take < min(LEAST_STEPS, rest):
                break
            take = rest if take + LEAST_STEPS > rest else take
            yield program, tile, step, step + take
            given += take * cost
            tile, step = (tile + 1, 0) if take == rest else (tile, step + take)


def level(heights: list[float], amount: float) -> float:
    """To what height `amount` fills vessels that are filled to `heights`."""
    below = 0.0
    for i, height in enumerate(sorted(heights)):
        if i and height * i - below >= amount:
            return (amount + below) / i
        below += height
    return (amount + below) / len(heights)


def table(segments: list[list[Segment]]) -> tuple[list[list[list[int]]], int]:
    """[programs, segments + 1, 6] numbers (a tile as one number, steps, slot, helpers, the program's number of
    segments; the last row has no steps), and the number of slots."""
    longest = max(len(each) for each in segments) + 1
    rows = []
    for each in segments:
        own = [[p.row * COLUMNS_MOST + p.column, p.first, p.last, p.slot, p.helpers, len(each)] for p in each]
        rows.append(own + [[0] * 6 for _ in range(longest - len(own))])
    return rows, sum(1 for each in segments for segment in each if segment.helpers < 0)
