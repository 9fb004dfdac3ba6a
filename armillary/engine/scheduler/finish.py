"""Whether a token is an answer's last one, and why. (Ends by length are known when the step is decided.)"""

from __future__ import annotations

from typing import NamedTuple

from armillary.engine.request.sequence import BROKEN, Finish, Sequence


class Ending(NamedTuple):
    """Why an answer is over."""

    finish: Finish
    error: str = ""


_BROKEN = Ending("error", "the model gave no number that can be drawn from; check its weights and dtype")


def find_endings(sequences: list[Sequence], tokens: list[int]) -> list[tuple[Sequence, Ending]]:
    """Those for whom the token they have just got was the last; constraints are told of theirs."""
    looked = ((seq, _ending(seq, token)) for seq, token in zip(sequences, tokens, strict=True) if token in seq.watched)
    return [(seq, ending) for seq, ending in looked if ending is not None]


def _ending(seq: Sequence, token: int) -> Ending | None:
    if token == BROKEN:
        return _BROKEN
    if token in seq.stops and seq.num_output >= seq.request.params.min_tokens:
        return Ending("stop")
    constraint = seq.constraint
    if constraint is not None and not constraint.advance(token):
        return Ending("error", f"token {token} breaks the asked-for structure; report this as a bug")
    return Ending("stop") if constraint is not None and constraint.finished() else None
