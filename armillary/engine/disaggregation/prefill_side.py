"""The prefill side: computes prompts for decode servers, and sends their KV blocks after every step that filled some.

A prompt is an ordinary request of one token, so chunked prefill, the prefix cache and preemption work as always; after
every step the blocks that are full are copied to host memory, and a thread per connection sends them. Of one connection
no more prompts are started than `window_bytes` of blocks that the other side has not taken: a decode server that
stops reading stops its prompts, and nothing else.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import BlockBytes, Payload
from armillary.engine.disaggregation.wire import Frame, Kind, PeerGone, Prompt
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence, State
from armillary.errors import ArmillaryError, BadInput

_FRAME_BYTES = 1 << 22
"""about, of one frame of blocks"""


@dataclass(eq=False)
class Feed:
    """One prompt that a decode server asked for."""

    peer: DecodePeer
    number: int
    prompt: Prompt
    request_id: str
    expected_bytes: int
    """of its blocks that are not in the queue of the connection yet"""
    stop: int
    """blocks of the prompt"""
    sent: int = 0
    """blocks of the prompt that are queued or not wanted"""
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: bool = False


class DecodePeer:
    """The connection to one decode server: a thread that reads, and one that sends."""

    def __init__(self, side: PrefillSide, sock: socket.socket) -> None:
        self._side, self._sock = side, sock
        self._queue: queue.SimpleQueue[tuple[Frame, Payload | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """guards what follows"""
        self._waiting: deque[Feed] = deque()
        self._feeds: dict[int, Feed] = {}
        self._unsent_bytes = 0  # of prompts that were started
        self._closed = False

    def run(self) -> None:
        """Read until the connection ends; then its prompts are aborted, which frees their blocks."""
        try:
            self._greet()
            self._sock.settimeout(None)
            threading.Thread(target=self._send, name="kv-send", daemon=True).start()
            while True:
                self._take(wire.receive(self._sock))
        except PeerGone:
            return
        finally:
            self.close()

    def _greet(self) -> None:
        self._sock.settimeout(wire.SILENCE_S)
        wire.prepare(self._sock)
        hello, own = wire.receive(self._sock), self._side.fingerprint
        if hello.kind is not Kind.HELLO or hello.entries or hello.number != wire.VERSION:
            wire.send(self._sock, Frame(Kind.REFUSAL, head=b"it is of another version"))
            raise PeerGone("another version")
        if bytes(hello.head) != own:
            wire.send(self._sock, Frame(Kind.REFUSAL, head=b"it serves another model, dtype or block size"))
            raise PeerGone("another model")
        wire.send(self._sock, wire.hello(own))

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.REQUEST:
            feed = self._side.feed(self, frame.number, Prompt.read(frame))
            with self._lock:
                self._waiting.append(feed)
                self._feeds[feed.number] = feed
            self._start_some()
        elif frame.kind is Kind.CANCEL:
            with self._lock:
                cancelled = self._feeds.pop(frame.number, None)
            if cancelled is not None:
                self._drop([cancelled])
                self._start_some()

    def _start_some(self) -> None:
        """Start prompts in their order while the blocks that are on their way are few."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._closed or not self._waiting:
                    return
                more = self._waiting[0].expected_bytes
                if self._unsent_bytes and self._unsent_bytes + more > self._side.window_bytes:
                    return
                feed = self._waiting.popleft()
                self._unsent_bytes += more
            self._side.start(feed)

    def put(self, feed: Feed, frame: Frame, payload: Payload | None, num_bytes: int) -> None:
        """Queue blocks of a prompt. In the engine's thread."""
        feed.expected_bytes -= num_bytes
        self._queue.put((frame, payload))

    def done(self, feed: Feed, error: str = "") -> None:
        """All blocks of a prompt are queued, or no more will come."""
        with self._lock:
            self._feeds.pop(feed.number, None)
            self._unsent_bytes -= feed.expected_bytes
        self._queue.put((Frame(Kind.DONE, feed.number, head=error.encode()), None))

    def _drop(self, feeds: list[Feed]) -> None:
        for feed in feeds:
            feed.cancelled = True
            self._side.cancel(feed)

    def _send(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=1.0)
                except queue.Empty:
                    item = Frame(Kind.ALIVE), None
                if item is None:
                    return
                self._send_one(*item)
        except PeerGone as error:
            print(f"a decode server is gone: {error}", file=sys.stderr, flush=True)
            self.close()

    def _send_one(self, frame: Frame, payload: Payload | None) -> None:
        data = payload() if payload is not None else memoryview(b"")
        begin = time.monotonic()
        wire.send(self._sock, frame._replace(payload=data))
        self._side.sent(len(data), time.monotonic() - begin)
        with self._lock:
            self._unsent_bytes -= len(data)
        self._start_some()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            feeds, self._feeds = list(self._feeds.values()), {}
            self._waiting.clear()
        wire.close(self._sock)
        self._queue.put(None)
        self._drop(feeds)
        self._side.forget(self)


class PrefillSide:
    """Listens for decode servers and computes their prompts in this process's engine."""

    def __init__(
        self, worker: EngineThread, blocks: BlockBytes, *, fingerprint: bytes, address: str, window_bytes: int
    ) -> None:
        self.fingerprint, self.window_bytes = fingerprint, window_bytes
        self._worker, self._blocks = worker, blocks
        self._cache = worker.engine.scheduler.cache
        self._listener = _listen(address)
        self._peers: set[DecodePeer] = set()
        self._feeds: set[Feed] = set()  # of the engine's thread
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._sent_bytes, self._send_s = 0, 0.0
        self._at_once = max(1, _FRAME_BYTES // blocks.block_bytes)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def start_listening(self) -> None:
        threading.Thread(target=self._accept, name="decode-servers", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        wire.close(self._listener)
        for peer in list(self._peers):
            peer.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            peer = DecodePeer(self, sock)
            with self._lock:
                self._peers.add(peer)
            threading.Thread(target=peer.run, name="kv-requests", daemon=True).start()

    def forget(self, peer: DecodePeer) -> None:
        with self._lock:
            self._peers.discard(peer)

    def sent(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._sent_bytes += num_bytes
            self._send_s += seconds

    # --- prompts: in threads of connections

    def feed(self, peer: DecodePeer, number: int, prompt: Prompt) -> Feed:
        size = self._cache.block_tokens
        stop = len(prompt.tokens) // size
        blocks = max(0, stop - prompt.first) * len(self._cache.groups)
        return Feed(
            peer=peer,
            number=number,
            prompt=prompt,
            request_id=f"prefill-{next(self._numbers)}",
            expected_bytes=blocks * self._blocks.block_bytes,
            stop=stop,
        )

    def start(self, feed: Feed) -> None:
        """Submit a prompt to the engine: its whole blocks, and one token that nobody reads."""
        tokens = feed.prompt.tokens[: feed.stop * self._cache.block_tokens]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(id=feed.request_id, prompt=tokens, params=params, salt=feed.prompt.salt)
        self._worker.between_steps(lambda: self._feeds.add(feed))
        try:
            feed.sequences += self._worker.submit(request, lambda delta: self._ended(feed, delta))
        except ArmillaryError as error:
            text = str(error)
            self._worker.between_steps(lambda: self._finish(feed, text))
        if feed.cancelled:  # meanwhile
            self.cancel(feed)

    def cancel(self, feed: Feed) -> None:
        self._worker.between_steps(lambda: self._finish(feed, "cancelled"))
        self._worker.abort(feed.request_id)

    # --- in the engine's thread

    def _ended(self, feed: Feed, delta: OutputDelta) -> None:
        """A delta of the prompt's request: it is refused or over; `after_step` sends its last blocks."""
        if delta.finish == "error" and feed in self._feeds:
            self._finish(feed, delta.error)

    def wants(self, seq: Sequence) -> bool:
        """Nothing is fetched on this side."""
        return False

    def ask(self, seq: Sequence) -> None:
        raise AssertionError("a prefill server computes its prompts")

    def after_step(self) -> None:
        """Queue the blocks that the last step filled."""
        for feed in list(self._feeds):
            if feed.sequences:
                self._collect(feed, feed.sequences[0])

    def _collect(self, feed: Feed, seq: Sequence) -> None:
        size = self._cache.block_tokens
        if seq.state is State.RUNNING:
            self._cache.register_blocks(seq)
            full = min(feed.stop, seq.computed // size)
        else:
            full = feed.stop if seq.finish in ("stop", "length") else feed.sent
        if full > feed.sent and not self._queue_blocks(feed, seq, full):
            return self._finish(feed, "its blocks were evicted")
        if feed.sent >= feed.stop or seq.finish is not None:
            self._finish(feed, "" if feed.sent >= feed.stop else f"it ended with {seq.finish}")

    def _queue_blocks(self, feed: Feed, seq: Sequence, full: int) -> bool:
        """Whether all wanted blocks up to `full` were there."""
        cache, wanted = self._cache, []
        for index in range(feed.sent, full):
            for g, group in enumerate(cache.groups):
                full_attention = group.sees == "all"
                needed = feed.prompt.first if full_attention else group.first_needed(feed.stop * cache.block_tokens)
                if index < (needed if full_attention else needed // cache.block_tokens):
                    continue
                block = cache.prefix_cache.of(seq.chain, g, index)
                if not block:
                    return False
                wanted.append((block, g, index))
        feed.sent = full
        for begin in range(0, len(wanted), self._at_once):
            part = wanted[begin : begin + self._at_once]
            payload = self._blocks.read([block for block, _, _ in part])
            head = wire.entries_head((g, index) for _, g, index in part)
            frame = Frame(Kind.BLOCKS, feed.number, len(part), head)
            feed.peer.put(feed, frame, payload, len(part) * self._blocks.block_bytes)
        return True

    def _finish(self, feed: Feed, error: str) -> None:
        if feed in self._feeds:
            self._feeds.discard(feed)
            feed.peer.done(feed, error)

    def gauges(self) -> dict[str, float]:
        return {
            "kv_sent_bytes_total": self._sent_bytes,
            "kv_send_wait_s_total": self._send_s,
            "decode_servers": len(self._peers),
        }


def _listen(address: str) -> socket.socket:
    host, port = wire.parse_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadInput(f"cannot listen on serve.prefill={address} ({error.strerror}); take another port") from None
