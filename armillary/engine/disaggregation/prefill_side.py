"""The prefill side: computes prompts for decode servers, and sends their KV blocks after every step that filled some.

A prompt is an ordinary request of one token, so chunked prefill, the prefix cache and preemption work as always; after
every step the blocks that are full are copied to host memory, and a thread per connection sends them. Of one connection
no more prompts are started than `window_bytes` of blocks that the other side has not taken: a decode server that
stops reading stops its prompts, and nothing else.
"""

from __future__ import annotations

import socket
import sys
import threading
from itertools import count

from armillary.engine.disaggregation import wire
from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.decode_peer import DecodePeer, PrefillTask
from armillary.engine.disaggregation.shared_memory import SharedSlots
from armillary.engine.disaggregation.wire import Frame, FrameType, Prompt
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence, State
from armillary.errors import ArmillaryError, BadInput

_FRAME_BYTES = 1 << 22
"""about, of one frame of blocks"""


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
        self._tasks: set[PrefillTask] = set()  # of the engine's thread
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

    def slots(self) -> SharedSlots | None:
        """Memory to share with a decode server; none: blocks are on a GPU, and cross its link in pinned memory."""
        if sys.platform != "linux" or not self._blocks.in_host_memory:
            return None
        return SharedSlots(self._at_once * self._blocks.block_bytes, self.window_bytes)

    def forget(self, peer: DecodePeer) -> None:
        with self._lock:
            self._peers.discard(peer)

    def sent(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._sent_bytes += num_bytes
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
            expected_bytes=blocks * self._blocks.block_bytes,
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
        task.sent = full
        for begin in range(0, len(wanted), self._at_once):
            part = wanted[begin : begin + self._at_once]
            payload = self._blocks.read([block for block, _, _ in part], task.peer.shared_slot())
            head = wire.entries_head((g, index) for _, g, index in part)
            frame = Frame(FrameType.BLOCKS, task.number, len(part), head)
            task.peer.put(task, frame, payload, len(part) * self._blocks.block_bytes)
        return True

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


def _listen(address: str) -> socket.socket:
    host, port = wire.parse_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadInput(f"cannot listen on serve.prefill={address} ({error.strerror}); take another port") from None
