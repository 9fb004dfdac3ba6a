"""The prefill side: computes prompts for decode servers, and sends their KV blocks after every step that filled some.

A prompt is an ordinary request of one token, so chunked prefill, the prefix cache and preemption work as always; after
every step the blocks that are full are copied to host memory, and a thread per connection sends them. Of one connection
no more prompts are started than `window_bytes` of blocks that the other side has not taken: a decode server that
stops reading stops its prompts, and nothing else.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.decode_peer import DecodePeer, PrefillTask
from armillary.engine.disaggregation.prefill_rank import Links, PrefillRank
from armillary.engine.disaggregation.wire import Frame, FrameType, PeerGone, Prompt
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence, State
from armillary.errors import ArmillaryError, BadInput


class PrefillSide:
    """Listens for decode servers and computes their prompts in this process's engine."""

    def __init__(
        self,
        worker: EngineThread,
        blocks: BlockBytes,
        rank: PrefillRank,
        *,
        fingerprint: bytes,
        address: str,
        window_bytes: int,
        order: Callable[[dict[str, Any]], None],
    ) -> None:
        """`order` tells the engine's other ranks to send blocks, in the engine's thread."""
        self.fingerprint, self.window_bytes = fingerprint, window_bytes
        self.ranks, self.stages = rank.ranks, rank.stages
        self._worker, self._rank, self._order = worker, rank, order
        self._cache = worker.engine.scheduler.cache
        self._whole_bytes = blocks.whole_bytes(rank.kv_heads, rank.tp, rank.stages)
        self._peers: set[DecodePeer] = set()
        self._tasks: set[PrefillTask] = set()  # of the engine's thread
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._sent_bytes, self._send_s = 0, 0.0
        self.address = rank.listen(address, self._greet)

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._rank.close()
        for peer in list(self._peers):
            peer.close()

    # --- decode servers: in threads of their connections

    def _greet(self, sock: socket.socket, hello: Frame) -> None:
        """Serve a decode server until its connection ends."""
        try:
            peer = DecodePeer(self, sock, hello)
        except (BadInput, PeerGone) as error:
            return wire.send(sock, Frame(FrameType.REFUSAL, head=str(error).encode()))
        peer.run()

    def open(self, peer: DecodePeer, receivers: int) -> Links:
        """Links to all ranks of a decode server, on all ranks of this one."""
        links = self._rank.open(
            peer.key,
            receivers,
            on_sent=partial(self._sent, peer),
            on_taken=peer.taken,
            on_gone=peer.close,
        )
        with self._lock:
            self._peers.add(peer)
        self._tell(do="open", key=peer.key.hex(), ranks=receivers)
        return links

    def forget(self, peer: DecodePeer) -> None:
        with self._lock:
            self._peers.discard(peer)
        self._rank.close_links(peer.key)
        self._tell(do="close", key=peer.key.hex())

    def _tell(self, **order: Any) -> None:
        self._worker.between_steps(lambda: self._order(order))

    def _sent(self, peer: DecodePeer, num_bytes: int, seconds: float) -> None:
        """On the first link; the others send their heads of the same blocks."""
        with self._lock:
            self._sent_bytes += num_bytes // peer.block_bytes * self._whole_bytes
            self._send_s += seconds

    # --- prompts: in threads of connections

    def make_task(self, peer: DecodePeer, number: int, prompt: Prompt) -> PrefillTask:
        size = self._cache.block_tokens
        stop = len(prompt.tokens) // size
        blocks = max(0, stop - prompt.first) * len(self._cache.groups)
        return PrefillTask(
            peer=peer,
            number=number,
            prompt=prompt,
            request_id=f"prefill-{next(self._numbers)}",
            expected_blocks=blocks,
            stop=stop,
        )

    def start(self, task: PrefillTask) -> None:
        """Submit a prompt to the engine: its whole blocks, and one token that nobody reads."""
        tokens = task.prompt.tokens[: task.stop * self._cache.block_tokens]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(id=task.request_id, prompt=tokens, params=params, salt=task.prompt.salt)
        self._worker.between_steps(lambda: self._tasks.add(task))
        try:
            task.sequences = self._worker.submit(request, lambda delta: self._ended(task, delta))
        except ArmillaryError as error:
            text = str(error)
            self._worker.between_steps(lambda: self._finish(task, text))
        if task.cancelled:  # meanwhile
            self.cancel(task)

    def cancel(self, task: PrefillTask) -> None:
        self._worker.between_steps(lambda: self._finish(task, "cancelled"))
        self._worker.abort(task.request_id)

    # --- in the engine's thread

    def _ended(self, task: PrefillTask, delta: OutputDelta) -> None:
        """A delta of the prompt's request: it is refused or over; `after_step` sends its last blocks."""
        task.sequences = [delta.sequence]  # it may be over before `start` knows it
        if delta.finish == "error" and task in self._tasks:
            self._finish(task, delta.error)

    def wants(self, seq: Sequence) -> bool:
        """Nothing is fetched on this side."""
        return False

    def ask(self, seq: Sequence) -> None:
        raise AssertionError("a prefill server computes its prompts")

    def after_step(self) -> None:
        """Queue the blocks that the last step filled."""
        for task in list(self._tasks):
            if task.sequences:
                self._collect(task, task.sequences[0])

    def _collect(self, task: PrefillTask, seq: Sequence) -> None:
        size = self._cache.block_tokens
        if seq.state is State.RUNNING:
            self._cache.register_blocks(seq)
            full = min(task.stop, seq.computed // size)
        else:
            full = task.stop if seq.finish in ("stop", "length") else task.sent
        if full > task.sent and not self._queue_blocks(task, seq, full):
            return self._finish(task, "its blocks were evicted")
        if task.sent >= task.stop or seq.finish is not None:
            self._finish(task, "" if task.sent >= task.stop else f"it ended with {seq.finish}")

    def _queue_blocks(self, task: PrefillTask, seq: Sequence, full: int) -> bool:
        """Whether all wanted blocks up to `full` were there."""
        cache, wanted = self._cache, []
        for index in range(task.sent, full):
            for g, group in enumerate(cache.groups):
                full_attention = group.sees == "all"
                needed = task.prompt.first if full_attention else group.first_needed(task.stop * cache.block_tokens)
                if index < (needed if full_attention else needed // cache.block_tokens):
                    continue
                block = cache.prefix_cache.of(seq.chain, g, index)
                if not block:
                    return False
                wanted.append((block, g, index))
        task.sent, at_once = full, task.peer.blocks_at_once
        for begin in range(0, len(wanted), at_once):
            part = wanted[begin : begin + at_once]
            head = wire.entries_head((g, index) for _, g, index in part)
            self._send(task, Frame(FrameType.BLOCKS, task.number, len(part), head), [block for block, _, _ in part])
        return True

    def _send(self, task: PrefillTask, frame: Frame, blocks: list[int]) -> None:
        """From every rank, which all run the same steps."""
        task.expected_blocks -= len(blocks)
        self._order({"do": "send", "key": task.peer.key.hex(), "number": frame.number, "blocks": blocks})
        self._rank.send(task.peer.key, frame, blocks)

    def _finish(self, task: PrefillTask, error: str) -> None:
        if task in self._tasks:
            self._tasks.discard(task)
            task.peer.done(task, error)

    def gauges(self) -> dict[str, float]:
        return {
            "kv_sent_bytes_total": self._sent_bytes,
            "kv_send_wait_s_total": self._send_s,
            "decode_servers": len(self._peers),
        }
