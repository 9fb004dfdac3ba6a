"""What the engine's thread tells the server: every turn of its loop is one message, however many answers grew."""

from __future__ import annotations

import time
from collections.abc import Callable

from armillary.engine.output.output_text import Piece
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.telemetry.gauges import request_gauges, state_gauges
from armillary.serving.processes.engine_ipc import INDEX_BITS, Turn

_STATE_S = 0.2
"""between two looks at the engine's state"""


class Turns:
    """Collects the pieces of a turn and sends them."""

    def __init__(self, scheduler: Scheduler, send: Callable[[Turn], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._turn = Turn()
        self._state_at = 0.0

    def take(self, pieces: list[Piece]) -> None:
        """In the engine's thread: what a step, or an abort, brought."""
        turn = self._turn
        for piece in pieces:
            seq = piece.sequence
            key = int(seq.request.id) << INDEX_BITS | seq.index
            if piece.logprobs:
                turn.logprobs[len(turn.tokens)] = tuple(piece.logprobs[0])
            if seq.prompt_logprobs and seq.index == 0 and seq.num_output <= 1:
                turn.prompts[int(seq.request.id)] = list(map(tuple, seq.prompt_logprobs))
            if piece.tokens:
                turn.keys.append(key)
                turn.tokens.append(piece.tokens[0])
            if piece.finish is not None:
                turn.ends.append((key, piece.finish, piece.error, request_gauges(seq)))

    def flush(self) -> None:
        """At the end of a turn: send it, also where it is empty."""
        turn, self._turn = self._turn, Turn()
        now = time.monotonic()
        if now - self._state_at >= _STATE_S:
            self._state_at, turn.state = now, state_gauges(self._scheduler)
        self._send(turn)
