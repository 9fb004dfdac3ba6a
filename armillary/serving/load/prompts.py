"""Words for requests: pieces of the Python library's source, cut to a number of tokens, some with equal beginnings.

What a token is, only the server knows: a ruler turns tokens into characters, by a tokenizer or by the server's counts.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from armillary.errors import BadData, NotFound
from armillary.serving.load.record import Planned
from armillary.serving.load.trace import BLOCK_TOKENS

_CORPUS_CHARS = 2_000_000
_FALLBACK = "the quick brown fox jumps over the lazy dog; "


@cache
def corpus(limit: int = _CORPUS_CHARS) -> str:
    """Source text of the standard library on this machine."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size >= limit:
            break
    text = "".join(parts)[:limit]
    return text if len(text) > BLOCK_TOKENS else _FALLBACK * (limit // len(_FALLBACK))


class Cut(Protocol):
    """A ruler; it can be sent to another process."""

    def __call__(self, tokens: int, dice: Random) -> str:
        """Text of about so many tokens, from a place that the dice choose."""


@dataclass(frozen=True, kw_only=True)
class ByCharacters:
    """Tokens of so many characters on average."""

    per_token: float
    """characters"""

    def __call__(self, tokens: int, dice: Random) -> str:
        text, size = corpus(), max(1, round(tokens * self.per_token))
        return str(_round(text, dice.randrange(len(text)), size))


@dataclass(frozen=True, kw_only=True)
class ByTokenizer:
    """Tokens of a tokenizer.json; exact but for the seams of a piece."""

    folder: str
    """where it is"""

    def __call__(self, tokens: int, dice: Random) -> str:
        tokenizer, ids = _tokenizer(self.folder)
        return str(tokenizer.decode(_round(ids, dice.randrange(len(ids)), tokens), skip_special_tokens=False))


@cache
def _tokenizer(folder: str) -> tuple[Any, list[int]]:
    """(the tokenizer, the corpus in its tokens)."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.exists():
        raise NotFound(f"no tokenizer at {path}; give a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadData(f"{path} is not a tokenizer ({error}); give a folder with a tokenizer.json") from None
    return tokenizer, list(tokenizer.encode(corpus(_CORPUS_CHARS // 4), add_special_tokens=False).ids)


def _round(whole: Any, start: int, length: int) -> Any:
    """`length` items from `start` on, round the end as often as needed."""
    found = whole[start : start + length]
    while len(found) < length:
        found = found + whole[: length - len(found)]
    return found


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Makes the prompts of a test; equal seeds give equal prompts."""

    cut: Cut
    """the ruler"""
    overhead: int = 0
    """tokens that the server's chat template adds to each prompt"""
    shared: int = 0
    """tokens of the beginnings that requests have in common"""
    prefixes: int = 1
    """how many such beginnings there are"""
    seed: int = 0
    """of this run"""

    def prompt(self, index: int, row: Planned) -> str:
        """Text of request `index`."""
        dice = Random(f"prompt {self.seed} {index}")
        tokens = max(1, row.tokens_in - self.overhead)
        if row.blocks:
            return self._of_blocks(row, tokens)
        if not self.shared:
            return self.cut(tokens, dice)
        shared = min(self.shared, tokens)
        which = Random(f"prefix {dice.randrange(self.prefixes)}")
        return self.cut(shared, which) + (self.cut(tokens - shared, dice) if tokens > shared else "")

    def _of_blocks(self, row: Planned, tokens: int) -> str:
        """Each block's text follows from its name alone, so that requests share what the recorded ones did."""
        parts = []
        for name in row.blocks:
            size = min(BLOCK_TOKENS, tokens)
            if size <= 0:
                break
            parts.append(self.cut(size, Random(f"block {name}")))
            tokens -= size
        if tokens > 0:
            parts.append(self.cut(tokens, Random(f"rest {row.blocks[-1]}")))
        return "".join(parts)
