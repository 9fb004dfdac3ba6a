"""Whether a token is an answer's last one, and why. (Ends by length are known when the step is decided.)"""

from __future__ import annotations

from typing import NamedTuple

from armillary.serving.engine.sequence import BROKEN, Finish, Sequence


class Ending(NamedTuple):
    """Why an answer is over."""

    finish: Finish
    error: str = ""


_BROKEN = Ending("error", "the model gave no number that can be drawn from; check its weights and dtype")


def find_ending(seq: Sequence, token: int) -> Ending | None:
    """Look at the token that `seq` has just got. A constraint is told of it."""
    if token == BROKEN:
        return _BROKEN
    if token in seq.stops and seq.num_output >= seq.request.params.min_tokens:
        return Ending("stop")
    constraint = seq.constraint
    if constraint is not None and not constraint.advance(token):
        return Ending("error", f"token {token} breaks the asked-for structure; report this as a bug")
    return Ending("stop") if constraint is not None and constraint.finished() else None
