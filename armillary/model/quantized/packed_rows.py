"""A packed weight matrix as it lies in memory, and the fused matrix made of several, joined by rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.errors import BadLayout
from armillary.model.quantized.formats import Format, Plain, Rows

Join = Callable[[Sequence[Tensor]], Tensor]  # of `fused_rows`: permutes rows, never changes what is in them


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """[N, K] in a format."""

    format: Format
    rows: Rows  # each [N, …]
    columns: int
    order_K: Tensor | None = None
    """columns are stored in this order, groups together (GPTQ with act-order); None: in their own"""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def nbytes(self) -> int:
        order = 0 if self.order_K is None else self.order_K.nbytes
        return sum(tensor.nbytes for tensor in self.rows.values()) + order

    def select(self, rows: slice | Tensor) -> "PackedRows":
        return replace(self, rows={name: tensor[rows] for name, tensor in self.rows.items()})

    def select_columns(self, begin: int, end: int) -> "PackedRows":
        """Some adjacent columns; BadLayout where that would divide a group of columns that share a scale, or where
        columns are stored in another order."""
        rows = {name: self._of_columns(tensor, begin, end) for name, tensor in self.rows.items()}
        if self.order_K is not None or any(tensor is None for tensor in rows.values()) or not self.format.divisible:
            raise BadLayout(
                f"weights of {self.columns} packed inputs are not divided at {begin} and {end}: columns that share a "
                "scale stay together; take fewer ranks"
            )
        selected = {name: tensor for name, tensor in rows.items() if tensor is not None}
        return replace(self, rows=selected, columns=end - begin)

    def _of_columns(self, tensor: Tensor, begin: int, end: int) -> Tensor | None:
        """A tensor has a number per row, or one per so many columns."""
        width = tensor.shape[1] if tensor.dim() > 1 else 1
        if width == 1:
            return tensor
        step = self.format.block_columns
        if step == 1:
            step = self.columns // width
        if (self.columns % width and self.format.block_columns == 1) or begin % step or end % step:
            return None
        return tensor[:, begin * width // self.columns : end * width // self.columns].clone()

    def stored_order(self) -> Tensor:
        """[N, K], columns as they are stored."""
        return self.format.dequantise(self.rows)

    def dequantised(self) -> Tensor:
        """[N, K], columns in their own order."""
        stored = self.stored_order()
        if self.order_K is None:
            return stored
        weight = torch.empty_like(stored)
        weight[:, self.order_K] = stored
        return weight

    def to(self, device: torch.device) -> "PackedRows":
        order = None if self.order_K is None else self.order_K.to(device)
        return replace(self, rows={name: tensor.to(device) for name, tensor in self.rows.items()}, order_K=order)


def plain(weight_NK: Tensor) -> PackedRows:
    return PackedRows(format=Plain(), rows={"weight": weight_NK}, columns=weight_NK.shape[1])


@dataclass(frozen=True, kw_only=True)
class FusedRows:
    """Several packed matrices above each other, and the order of their rows in the fused one. Matrices of one format
    are already joined: a single part in order."""

    parts: tuple[PackedRows, ...]
    order_N: Tensor | None = None  # row n of the fused matrix is row order_N[n] of the parts above each other

    def select(self, rows: Tensor) -> "FusedRows":
        """Some rows of the fused matrix."""
        if self.order_N is None and len(self.parts) == 1:
            return FusedRows(parts=(self.parts[0].select(rows),))
        begins = [0]
        for part in self.parts:
            begins.append(begins[-1] + part.num_rows)
        wanted = rows if self.order_N is None else self.order_N[rows].long()
        parts, order, at = [], torch.empty(len(wanted), dtype=torch.int32), 0
        for part, begin, end in zip(self.parts, begins, begins[1:], strict=False):
            here = (wanted >= begin) & (wanted < end)
            parts.append(part.select(wanted[here] - begin))
            order[here] = torch.arange(at, at + int(here.sum()), dtype=torch.int32)
            at += int(here.sum())
        return FusedRows(parts=tuple(parts), order_N=order)

    def select_columns(self, begin: int, end: int) -> "FusedRows":
        return replace(self, parts=tuple(part.select_columns(begin, end) for part in self.parts))

    @property
    def nbytes(self) -> int:
        order = 0 if self.order_N is None else self.order_N.nbytes
        return sum(part.nbytes for part in self.parts) + order

    def dequantised(self) -> Tensor:
        wide = torch.cat([part.dequantised() for part in self.parts])
        return wide if self.order_N is None else wide[self.order_N]


def join_rows(join: Join, parts: Sequence[PackedRows]) -> FusedRows:
    """`join` of `hf_layout` on packed matrices."""
    first = parts[0]
    if all(_joinable(first, other) for other in parts[1:]):
        rows = {name: join([part.rows[name] for part in parts]) for name in first.rows}
        flat = {name: tensor.flatten(0, -2) for name, tensor in rows.items()}
        return FusedRows(parts=(replace(first, rows={name: each.contiguous() for name, each in flat.items()}),))
    begin, numbers = 0, []
    for part in parts:
        numbers.append(torch.arange(begin, begin + part.num_rows)[:, None])
        begin += part.num_rows
    return FusedRows(parts=tuple(parts), order_N=join(numbers).flatten().int())


def _joinable(a: PackedRows, b: PackedRows) -> bool:
    if a.format != b.format or a.columns != b.columns or a.rows.keys() != b.rows.keys():
        return False
    if (a.order_K is None) != (b.order_K is None):
        return False
    alike = all(
        x.dtype == y.dtype and x.shape[1:] == y.shape[1:] for x, y in zip(a.rows.values(), b.rows.values(), strict=True)
    )
    return alike and (a.order_K is None or torch.equal(a.order_K, b.order_K))  # type: ignore[arg-type]
