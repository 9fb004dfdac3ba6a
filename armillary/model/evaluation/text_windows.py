"""Text as windows of tokens, to calibrate on and to measure perplexity: a file, or Python's own sources.

Every window begins with what the tokenizer puts before a text (bos), which many models need to work at all.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from armillary.errors import BadInput, NotFound
from armillary.model.text.tokenizer import Tokenizer

# W windows, T tokens of each
MOST_BYTES = 64 << 20
"""read of a text: more than any measurement here needs"""
_PIECE = 1 << 16  # characters encoded at a time
_PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "xml")
_BYTES_PER_TOKEN = 6  # more than English or code needs with a vocabulary of 500 or more


@dataclass(frozen=True, kw_only=True)
class TextWindows:
    """Tokens of a text."""

    tokens_WT: Tensor
    first: int  # of the tokens that are predicted: those before have nothing to be predicted from
    origin: str  # for reports

    @property
    def predicted(self) -> int:
        """Tokens per window whose probability counts."""
        return self.tokens_WT.shape[1] - self.first

    def __len__(self) -> int:
        return len(self.tokens_WT)

    def split(self, step: int) -> tuple["TextWindows", "TextWindows"]:
        """(the others, one window of `step`): what one sees the other does not."""
        is_held_out = torch.arange(len(self)) % step == step - 1
        return self._only(~is_held_out), self._only(is_held_out)

    def _only(self, which_W: Tensor) -> "TextWindows":
        return TextWindows(tokens_WT=self.tokens_WT[which_W], first=self.first, origin=self.origin)


def text_windows(tokenizer: Tokenizer, path: Path | None, *, length: int, most: int) -> TextWindows:
    """Windows of `length` tokens of a UTF-8 file, or of Python's sources; at most `most`, spread over the text."""
    prefix = _prefix(tokenizer)
    body = length - len(prefix)
    if body < 2:
        raise BadInput(f"windows of {length} tokens hold no text; take at least {len(prefix) + 2}")
    text = _embedded(2 * most * body * _BYTES_PER_TOKEN) if path is None else _read(path)
    ids = [token for piece in _pieces(text) for token in tokenizer.encode(piece, special=False)]
    count = len(ids) // body
    origin = "Python's standard library" if path is None else str(path)
    if not count:
        raise BadInput(f"{origin} has {len(ids)} tokens, fewer than a window of {body}; give a longer text")
    bodies = torch.tensor(ids[: count * body]).view(count, body)
    bodies = bodies[torch.arange(min(most, count)) * count // min(most, count)]
    tokens = torch.cat((torch.tensor(prefix, dtype=torch.long).expand(len(bodies), -1), bodies), dim=1)
    return TextWindows(tokens_WT=tokens, first=max(1, len(prefix)), origin=origin)


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """Special tokens before a text, not those after it."""
    plain = tokenizer.encode("a", special=False)
    around = tokenizer.encode("a")
    begin = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
    return around[:begin]


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES)
    except FileNotFoundError:
        raise NotFound(f"no file {path}; check the name") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check its type and permissions") from None
    try:
        return content.decode("utf-8", errors="ignore" if len(content) == MOST_BYTES else "strict")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; give a text file") from None


def _embedded(num_bytes: int) -> str:
    """Sources of the Python that runs this, of at least that size where it has as many."""
    texts, size = [], 0
    for path in _sources():
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size >= num_bytes:
            break
    if not texts:
        raise BadInput("this Python comes without its sources; give a text with --text")
    return "\n".join(texts)


def _sources() -> Iterator[Path]:
    """Modules of the standard library, mixed, in the same order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [*root.glob("*.py"), *(path for name in _PACKAGES for path in (root / name).rglob("*.py"))]
    by_name = {path.relative_to(root).as_posix(): path for path in files if path.stat().st_size > 4096}
    yield from (by_name[name] for name in sorted(by_name, key=lambda name: crc32(name.encode())))


def _pieces(text: str) -> Iterator[str]:
    """Parts that end with a line where they can: tokenizers are slow on one long text."""
    at = 0
    while at < len(text):
        end = text.rfind("\n", at, at + _PIECE) + 1 if at + _PIECE < len(text) else len(text)
        end = end if end > at else at + _PIECE
        yield text[at:end]
        at = end
