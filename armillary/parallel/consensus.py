"""Consensus: small values that all ranks must agree on, exchanged through the host and never through the device.

A rank with an error tells the others before they wait for it in a collective, so that all raise the same error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from armillary.errors import ArmillaryError
from armillary.parallel.store_barrier import StoreBarrier

T = TypeVar("T")


class AgreedError(ArmillaryError):
    """An error of one rank, raised on every rank; the main rank prints it."""


class Consensus:
    """Over `size` ranks; with one rank nothing is sent."""

    def __init__(self, *, rank: int, size: int, group: ProcessGroup | None = None, store: Any = None) -> None:
        """`group` must take CPU tensors; None is the default group. `store` is where ranks meet; None is that of the
        default group, which a launcher may hold."""
        self.rank, self.size, self.group, self._store = rank, size, group, store

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def store(self) -> Any:
        return dist.distributed_c10d._get_default_store() if self._store is None else self._store

    def store_is_gone(self) -> bool:
        """Whether the store has ended, as with the launcher that held it; the same on every rank."""
        gone = False
        if self.size > 1:
            try:
                self.store.check(["any"])
            except dist.DistError:
                gone = True
        return self.total(float(gone))[0] > 0

    def with_new_store(self) -> Consensus:
        """The same ranks, with a store that the main rank holds."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.is_main else None
        port = self.broadcast(store.port if store is not None else 0)
        return Consensus(
            rank=self.rank, size=self.size, group=self.group, store=store or dist.TCPStore(host, port, is_master=False)
        )

    def total(self, *values: float) -> tuple[float, ...]:
        """The sums over all ranks; integers stay exact."""
        if self.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return tuple(sums.tolist())

    def broadcast(self, value: T) -> T:
        """The main rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work()` on every rank; where one raises an ArmillaryError, all raise it. Work with collectives of its
        own must not raise between them on some ranks only."""
        done, error = attempt(work)
        self.agree(error)
        return done  # type: ignore[return-value]

    def run_long(self, what: str, work: Callable[[], T]) -> T:
        """As `run_on_all`, for work that may take one rank hours while the others wait (`what`: 'prepare the data'): no
        collective times out, and a rank that ends is noticed."""
        if self.size == 1:
            return work()
        with StoreBarrier(rank=self.rank, size=self.size, store=self.store).working(what):
            done, error = attempt(work)
        self.agree(error)
        return done  # type: ignore[return-value]

    def agree(self, error: ArmillaryError | None) -> None:
        """Raise the first rank's error on all of them; go on where there is none."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        (failed,) = self.total(float(error is not None))
        if failed:
            self.raise_first(error)

    def raise_first(self, error: ArmillaryError | None) -> None:
        """Called by every rank once some rank is known to have failed."""
        if self.size == 1:
            assert error is not None
            raise error
        said = self.gather(str(error) if error is not None else None)
        raise AgreedError(next(text for text in said if text is not None)) from error


def attempt(work: Callable[[], T]) -> tuple[T | None, ArmillaryError | None]:
    """(result, None) or (None, error)."""
    try:
        return work(), None
    except ArmillaryError as error:
        return None, error
