"""One rank of a decode server: takes its heads of blocks from the ranks of the prefill server that have them.

The first rank has the requests and tells the others, in order with the steps, which blocks to write (`obey`). The same
blocks come in the same order on every connection, and are written once all ranks have theirs.
"""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import suppress
from typing import Any

import torch

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.block_reader import Arrived, BlockReader, ask, dial
from armillary.engine.disaggregation.head_slices import divides, head_slices
from armillary.engine.disaggregation.stage_slots import StageSlots
from armillary.engine.disaggregation.wire import PeerGone
from armillary.parallel.collectives import Group, all_reduce


class Source:
    """A rank of the prefill server, beside the first, and a thread that reads from it."""

    def __init__(self, address: tuple[str, int], key: bytes, rank: int) -> None:
        self._arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()  # none: the connection has ended
        self._ended = False
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, args=(address, key, rank), name="kv-receive", daemon=True).start()

    def next(self) -> Arrived | None:
        """The next blocks; None where none come. In the thread that runs the steps, which waits for them."""
        arrived = None
        if not self._ended:
            with suppress(queue.Empty):
                arrived = self._arrived.get(timeout=wire.SILENCE_S)
        self._ended = arrived is None
        return arrived

    def close(self) -> None:
        self._ended = True
        if self._sock is not None:
            wire.close(self._sock)

    def _run(self, address: tuple[str, int], key: bytes, rank: int) -> None:
        reader = None
        try:
            self._sock = dial(address)
            answer = ask(self._sock, wire.join(key, rank))
            reader = BlockReader(self._sock, bytes(answer.head))
            while not self._ended:
                if isinstance(arrived := reader.read(), Arrived):
                    self._arrived.put(arrived)
        except PeerGone:
            return
        finally:
            if reader is not None:
                reader.close()
            self._arrived.put(None)


class DecodeRank:
    """Sources of the connection that is open."""

    def __init__(self, blocks: BlockBytes, *, group: Group | None, kv_heads: int, address: str) -> None:
        """`group`: the ranks of this server; none: it is alone. `address`: of the prefill server's first rank."""
        self._blocks, self._group, self._kv_heads = blocks, group, kv_heads
        self.rank, self.ranks = (0, 1) if group is None else (group.rank, group.size)
        self._address = wire.parse_address(address)
        self._heads: list[range | None] = []  # of this rank, by source; on the first rank its connection is the first
        self._stages: list[StageSlots | None] = []  # the layers that each source has; None: all
        self._sources: list[Source] = []

    def open(self, key: bytes, senders: int, stages: int = 1) -> None:
        """Join the connection that the first rank has to a prefill server with so many ranks, an equal part of them on
        each of its stages."""
        self.close()
        tp = senders // stages
        slices = head_slices(self._kv_heads, tp, self.ranks) if divides(self._kv_heads, tp) else {}
        own = [(sender, heads.received) for (sender, rank), heads in slices.items() if rank == self.rank]
        host, port = self._address
        self._heads = [heads for _ in range(stages) for _, heads in own]
        self._stages = [slots for slots in self._blocks.stages(stages) for _ in own]
        numbers = [stage * tp + sender for stage in range(stages) for sender, _ in own]
        self._sources = [Source((host, port + n), key, self.rank) for n in numbers if n or self.rank]

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._heads, self._stages, self._sources = [], [], []

    def put(
        self, entries: int, blocks: list[int], chosen: list[int], groups: list[int], first: Arrived | None = None
    ) -> bool:
        """Write those at places `chosen` of the next frame, of so many entries, into `blocks`, which are of these
        `groups`, on all ranks together; False where some rank does not get it. `first`: what came on the first rank's
        connection."""
        arrived = [first] if first is not None else []
        arrived += [frame for source in self._sources if (frame := source.next()) is not None]
        try:
            came = self._agree(bool(arrived) and len(arrived) == len(self._heads) and self._fit(arrived, entries))
            if came:
                for each, heads, stage in zip(arrived, self._heads, self._stages, strict=True):
                    self._blocks.write(blocks, each.payload, chosen, heads, stage, groups)
        finally:
            for each in arrived:
                each.give_back()
        return came

    def _fit(self, arrived: list[Arrived], entries: int) -> bool:
        """Of the same blocks, in their size."""
        return all(
            each.entries == entries
            and each.number == arrived[0].number
            and len(each.payload) == entries * self._blocks.block_bytes(heads, stage)
            for each, heads, stage in zip(arrived, self._heads, self._stages, strict=True)
        )

    def _agree(self, came: bool) -> bool:
        if self._group is None:
            return came
        votes = torch.tensor([came], dtype=torch.int32, device=self._blocks.device)
        return bool(all_reduce(votes, self._group, "min").item())

    def obey(self, order: dict[str, Any]) -> None:
        """What the first rank does, on another."""
        if order["do"] == "open":
            self.open(bytes.fromhex(order["key"]), order["ranks"], order["stages"])
        elif order["do"] == "close":
            self.close()
        else:
            self._blocks.copy(order["copies"])
            self.put(order["entries"], order["blocks"], order["chosen"], order["groups"])
