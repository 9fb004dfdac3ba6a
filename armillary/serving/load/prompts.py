"""Prompts: excerpts of the Python standard library's source, cut to a number of tokens, some with shared prefixes.

Only the server knows its tokens: a `PromptCutter` converts tokens to text, by a tokenizer or by the server's counts.
"""

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from armillary.errors import BadData, NotFound
from armillary.serving.load.record import PlannedRequest
from armillary.serving.load.trace import BLOCK_TOKENS

_CORPUS_CHARS = 2_000_000
_FALLBACK_TEXT = "the quick brown fox jumps over the lazy dog; "


@cache
def corpus(limit: int = _CORPUS_CHARS) -> str:
    """Source text of the standard library on this machine."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)[:limit]
    return text if len(text) > BLOCK_TOKENS else _FALLBACK_TEXT * (limit // len(_FALLBACK_TEXT))


class PromptCutter(Protocol):
    """Makes text of a number of tokens; it can be sent to another process."""

    def __call__(self, tokens: int, rng: Random) -> str:
        """Text of about `tokens` tokens, from a random position."""


@dataclass(frozen=True, kw_only=True)
class ByCharacters:
    """Cuts by the mean number of characters per token."""

    per_token: float

    def __call__(self, tokens: int, rng: Random) -> str:
        text, size = corpus(), max(1, round(tokens * self.per_token))
        return str(_wrapped(text, rng.randrange(len(text)), size))


@dataclass(frozen=True, kw_only=True)
class ByTokenizer:
    """Cuts by a tokenizer.json; exact except at the ends of an excerpt."""

    folder: str

    def __call__(self, tokens: int, rng: Random) -> str:
        tokenizer, ids = _tokenizer(self.folder)
        return str(tokenizer.decode(_wrapped(ids, rng.randrange(len(ids)), tokens), skip_special_tokens=False))


@cache
def _tokenizer(folder: str) -> tuple[Any, list[int]]:
    """(tokenizer, corpus as its tokens)."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.exists():
        raise NotFound(f"no tokenizer at {path}; give a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadData(f"{path} is not a tokenizer ({error}); give a folder with a tokenizer.json") from None
    return tokenizer, list(tokenizer.encode(corpus(_CORPUS_CHARS // 4), add_special_tokens=False).ids)


def _wrapped(items: Any, start: int, length: int) -> Any:
    """`length` items from `start` on, wrapping around at the end."""
    part = items[start : start + length]
    while len(part) < length:
        part = part + items[: length - len(part)]
    return part


@dataclass(frozen=True, kw_only=True)
class PromptMaker:
    """Makes the prompts of a test; equal seeds give equal prompts. A prompt has `overhead` tokens of the server's chat
    template and begins with one of `prefixes` prefixes of `shared` tokens, but for those of the second stream."""

    cut: PromptCutter
    overhead: int = 0
    shared: int = 0
    prefixes: int = 1
    seed: int = 0

    def prompt(self, index: int, row: PlannedRequest) -> str:
        """The prompt of request `index`."""
        rng = Random(f"prompt {self.seed} {index}")
        tokens = max(1, row.tokens_in - self.overhead)
        if row.blocks:
            return self._from_blocks(row, tokens)
        if not self.shared or row.is_long:
            return self.cut(tokens, rng)
        shared = min(self.shared, tokens)
        which = Random(f"prefix {rng.randrange(self.prefixes)}")
        return self.cut(shared, which) + (self.cut(tokens - shared, rng) if tokens > shared else "")

    def _from_blocks(self, row: PlannedRequest, tokens: int) -> str:
        """Text of a trace's blocks: it depends on a block's name only, so that requests share prefixes as recorded."""
        sizes = [min(BLOCK_TOKENS, tokens - start) for start in range(0, tokens, BLOCK_TOKENS)]
        blocks = [self.cut(size, Random(f"block {name}")) for name, size in zip(row.blocks, sizes, strict=False)]
        rest = tokens - BLOCK_TOKENS * len(row.blocks)
        return "".join(blocks) + (self.cut(rest, Random(f"rest {row.blocks[-1]}")) if rest > 0 else "")
