"""One rank of a prefill server: reads its heads of blocks and sends them to the ranks of decode servers that want them.

The first rank has the prompts and tells the others, in order with the steps, which blocks to send (`obey`).
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.block_sender import BlockSender
from armillary.engine.disaggregation.head_slices import divides, head_slices
from armillary.engine.disaggregation.shared_memory import SharedSlots
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone
from armillary.errors import BadInput

_FRAME_BYTES = 1 << 22
"""about, of one frame of blocks"""


@dataclass(frozen=True)
class Link:
    """To one rank of a decode server."""

    sender: BlockSender
    heads: range | None


@dataclass(frozen=True)
class Links:
    """Of this rank to one decode server."""

    by_rank: dict[int, Link]
    block_bytes: int
    """most that one link carries of a block"""

    @property
    def blocks_at_once(self) -> int:
        return max(1, _FRAME_BYTES // self.block_bytes)


class PrefillRank:
    """Links by the key of the decode server's connection."""

    def __init__(
        self, blocks: BlockBytes, *, rank: int, ranks: int, kv_heads: int, window_bytes: int, stages: int = 1
    ) -> None:
        """`stages` of layers, each on as many neighbouring ranks, which have its heads; `window_bytes`: of blocks on
        their way to one decode server, over all links."""
        self._blocks, self.rank, self.ranks = blocks, rank, ranks
        self.stages, self.tp = stages, ranks // stages
        self.kv_heads, self._window_bytes = kv_heads, window_bytes
        self._links: dict[bytes, Links] = {}
        self._changed = threading.Condition()
        """guards the links"""
        self._listener: socket.socket | None = None

    def listen(self, address: str, on_hello: Callable[[socket.socket, Frame], None] | None = None) -> tuple[str, int]:
        """Take connections in a thread: of other ranks, and of decode servers where there is `on_hello`. The ranks of a
        server listen on successive ports."""
        self._listener = _listen(address, self.rank)
        threading.Thread(target=self._accept, args=(on_hello,), name="decode-servers", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        if self._listener is not None:
            wire.close(self._listener)
        for key in list(self._links):
            self.close_links(key)

    def _accept(self, on_hello: Callable[[socket.socket, Frame], None] | None) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(sock, on_hello), name="kv-requests", daemon=True).start()

    def _greet(self, sock: socket.socket, on_hello: Callable[[socket.socket, Frame], None] | None) -> None:
        try:
            sock.settimeout(wire.SILENCE_S)
            wire.prepare(sock)
            hello = wire.receive(sock)
            if hello.kind is FrameType.JOIN and hello.number == wire.VERSION:
                return self._serve_rank(sock, *wire.read_join(hello))
            if hello.kind is not FrameType.HELLO or hello.entries or hello.number != wire.VERSION:
                return wire.send(sock, Frame(FrameType.REFUSAL, head=b"it is of another version"))
            if on_hello is not None:
                on_hello(sock, hello)
        except (PeerGone, OSError):
            return
        finally:
            wire.close(sock)

    def _serve_rank(self, sock: socket.socket, key: bytes, receiver: int) -> None:
        """Until the connection ends. The other side may be here before the first rank's order."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._links, wire.SILENCE_S)
            links = self._links.get(key)
        if links is None or receiver not in links.by_rank:
            return
        sender = links.by_rank[receiver].sender
        wire.send(sock, Frame(FrameType.HELLO, wire.VERSION, head=sender.offer()))
        sock.settimeout(None)
        sender.start(sock)
        while True:
            sender.take(wire.receive(sock))

    def open(self, key: bytes, receivers: int, **first: Any) -> Links:
        """Links to a decode server with so many ranks; `first` are options of that to its first rank."""
        if not divides(self.kv_heads, receivers):
            raise BadInput(f"{receivers} ranks do not divide {self.kv_heads} KV heads")
        slices = head_slices(self.kv_heads, self.tp, receivers)
        block_bytes = self._blocks.block_bytes(slices[0, 0].sent)
        by_rank = {}
        for (sender, receiver), heads in slices.items():
            if sender == self.rank % self.tp:
                slots = self._slots(block_bytes, self._window_bytes // (len(slices) * self.stages))
                by_rank[receiver] = Link(BlockSender(slots, **({} if receiver else first)), heads.sent)
        with self._changed:
            self._links[key] = links = Links(by_rank, block_bytes)
            self._changed.notify_all()
        return links

    def _slots(self, block_bytes: int, window_bytes: int) -> SharedSlots | None:
        """Memory to share with a decode server; none: blocks are on a GPU, and cross its link in pinned memory."""
        if sys.platform != "linux" or not self._blocks.in_host_memory:
            return None
        return SharedSlots(max(1, _FRAME_BYTES // block_bytes) * block_bytes, window_bytes)

    def send(self, key: bytes, frame: Frame, blocks: list[int]) -> None:
        """Read blocks and queue them on every link. In the thread that runs the steps."""
        with self._changed:
            links = self._links.get(key)
        for receiver, link in () if links is None else links.by_rank.items():
            payload = self._blocks.read(blocks, link.sender.shared_slot(), link.heads)
            leads = not (self.rank or receiver)
            link.sender.put(frame if leads else frame._replace(head=b""), payload)

    def close_links(self, key: bytes) -> None:
        with self._changed:
            links = self._links.pop(key, None)
        for link in () if links is None else links.by_rank.values():
            with suppress(OSError):
                link.sender.close()

    def obey(self, order: dict[str, Any]) -> None:
        """What the first rank does, on another."""
        key = bytes.fromhex(order["key"])
        if order["do"] == "open":
            self.open(key, order["ranks"])
        elif order["do"] == "close":
            self.close_links(key)
        else:
            frame = Frame(FrameType.BLOCKS, order["number"], len(order["blocks"]))
            self.send(key, frame, order["blocks"])


def _listen(address: str, rank: int) -> socket.socket:
    host, port = wire.parse_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port + rank), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"rank {rank} cannot listen on port {port + rank}, for serve.prefill={address} ({why}); take another port"
        ) from None
