"""Where the rows of one of our tensors are in the Hugging Face tensors that it is joined from.

A row is all dims but the last, flattened; joining permutes rows and never changes what is in them. (Of a vector, every
number is a row; of experts that are stored with their two last dims exchanged, a column.) The map is found by joining
row numbers instead of weights, so it cannot differ from the join.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from armillary.model.weights.fused_rows import Join


class Run(NamedTuple):
    """`num_rows` rows from `row` on of the tensor number `source`, which are every `step`-th row of ours from `target`
    on."""

    source: int
    row: int
    num_rows: int
    target: int
    step: int


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def row_map(join: Join, shapes: Sequence[Sequence[int]]) -> list[Run]:
    """Of the tensor that `join` makes of tensors of these shapes."""
    begins, numbers = [0], []
    for shape in shapes:
        rows, _ = matrix_shape(shape)
        leading = shape[:-1] if len(shape) > 1 else shape
        numbers.append(torch.arange(begins[-1], begins[-1] + rows).view(*leading, 1))
        begins.append(begins[-1] + rows)
    return _all_runs(join(numbers), begins)


def column_map(join: Join, shape: Sequence[int]) -> list[Run]:
    """Of the tensor that `join` makes of experts that are stored [E, inputs, outputs]: a run's `source` is the number
    of the expert, and its rows are columns of what is stored."""
    experts, _, columns = shape
    numbers = torch.arange(experts * columns).view(experts, 1, columns)
    return _all_runs(join([numbers]), [expert * columns for expert in range(experts + 1)])


def _all_runs(joined_numbers: Tensor, begins: list[int]) -> list[Run]:
    """Of all sources, whose rows are numbered from `begins` on."""
    joined = joined_numbers.flatten().numpy()
    targets = np.empty_like(joined)
    targets[joined] = np.arange(len(joined))
    return [run for source, (begin, end) in enumerate(pairwise(begins)) for run in _runs(source, targets[begin:end])]


def _runs(source: int, targets: Any) -> list[Run]:
    """Rows whose targets are equally far apart, as few runs as a greedy search finds."""
    steps = np.diff(targets)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    runs, row, at = [], 0, 0
    while row < len(targets):
        while at < len(changes) and changes[at] <= row:
            at += 1
        last = changes[at] if at < len(changes) else row
        step = int(steps[row]) if row < len(steps) else 1
        if step < 1:
            last, step = row, 1
        runs.append(Run(source, row, last - row + 1, int(targets[row]), step))
        row = last + 1
    return runs
