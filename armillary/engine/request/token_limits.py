"""Tokens that a request allows or rules out, as a constraint: alone, or on top of a structure's.

vLLM's `allowed_token_ids` and `bad_words`: the latter are sequences of tokens whose last one may not come once the
others have.
"""

from collections.abc import Callable

from armillary.engine.request.constraint import Constraint
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.text.tokenizer import Tokenizer

Maker = Callable[[], Constraint]


def limited(params: SamplingParams, vocab: int, maker: Maker | None) -> Maker | None:
    """The structure's constraint, or none, combined with the tokens that a request allows or forbids."""
    if params.allowed_token_ids is None and not params.bad_tokens:
        return maker
    size = 4 * -(-vocab // 32)
    ids = params.allowed_token_ids
    allowed = (1 << vocab) - 1 if ids is None else int.from_bytes(_bits(ids, size), "little")
    return lambda: Limited(allowed, params.bad_tokens, size, None if maker is None else maker())


def _bits(ids: tuple[int, ...], size: int) -> bytes:
    bits = bytearray(size)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


class Limited:
    """The constraint of one sequence."""

    def __init__(self, allowed: int, bad: tuple[tuple[int, ...], ...], size: int, structure: Constraint | None) -> None:
        """`allowed` has bit v where token v may come; masks have `size` bytes."""
        self._allowed, self._bad, self._size, self._structure = allowed, bad, size, structure
        self._kept = max((len(tokens) for tokens in bad), default=1) - 1  # tokens before the next one that matter
        self._last: tuple[int, ...] = ()

    def allowed(self) -> bytes:
        bits = self._allowed
        for *before, token in self._bad:
            if self._last[len(self._last) - len(before) :] == tuple(before):
                bits &= ~(1 << token)
        if self._structure is not None:
            bits &= int.from_bytes(self._structure.allowed(), "little")
        return bits.to_bytes(self._size, "little")

    def advance(self, token: int) -> bool:
        if self._kept:
            self._last = (*self._last, token)[-self._kept :]
        return self._structure is None or self._structure.advance(token)

    def finished(self) -> bool:
        return self._structure is not None and self._structure.finished()


def bad_tokens_of(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of words at the beginning of a text, and of those that are written otherwise after a space (as
    vLLM does it). The same letters in other tokens are not ruled out."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), special=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), special=False))
        sequences |= dict.fromkeys([plain, spaced] if len(spaced) == len(plain) else [plain])
    return tuple(sequences)
