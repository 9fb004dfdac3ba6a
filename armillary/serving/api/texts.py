"""From texts and chats to token ids and back, in the server's process; long ones in a thread, so that nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError
from armillary.model.tokenizer import Detokenizer, Tokenizer
from armillary.serving.api import answer_text
from armillary.serving.api.problem import Problem, bad

_INLINE = 4_000
"""characters that are encoded on the spot: a thread would take longer"""
_MESSAGE, _TOOL = 20, 100
"""characters whose encoding takes about as long as a template takes for an empty message, or a tool"""


class Ids:
    """Stands in for a detokenizer where a model has no tokenizer: answers are numbers."""

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


class Texts:
    """The tokenizer of the model that is served, if it has one."""

    def __init__(self, folder: Path, eos_ids: Sequence[int]) -> None:
        has_text = (folder / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(folder) if has_text else None
        templates = self.tokenizer.templates.values() if self.tokenizer else ()
        self.knows_developer = any("developer" in template for template in templates)
        """the newer name of the system's role is one the chat template has heard of"""
        self.eos_ids = frozenset(self.tokenizer.eos_ids if self.tokenizer else eos_ids)

    async def encode(self, text: str, longest: int, param: str, *, special: bool = True) -> list[int]:
        """Ids of a text; one that is certainly longer than `longest` tokens is refused unread."""
        tokenizer = self._needed()
        if len(text) > longest * self._token_chars:
            raise too_long(f"more than {longest:,}", longest, param)
        try:
            if len(text) <= _INLINE:
                return tokenizer.encode(text, special=special)
            return await asyncio.to_thread(tokenizer.encode, text, special=special)
        except ArmillaryError as error:
            raise bad(str(error), param) from None

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], longest: int, *, tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Ids of a conversation, by the model's chat template."""
        tokenizer, size = self._needed(), sum(len(str(message.get("content") or "")) for message in messages)
        if size > longest * self._token_chars:
            raise too_long(f"more than {longest:,}", longest, "messages")

        def render() -> str:
            return tokenizer.chat(messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                  **(variables or {}))  # fmt: skip

        try:
            work = size + _MESSAGE * len(messages) + _TOOL * len(tools or ())
            text = render() if work <= _INLINE else await asyncio.to_thread(render)
        except ArmillaryError as error:
            raise bad(str(error), "messages") from None
        except TypeError:
            raise bad("chat_template_kwargs names a variable that the server sets; leave it out",
                      "chat_template_kwargs") from None  # fmt: skip
        return await self.encode(text, longest, "messages", special=False)

    def detokenizer(self, keep: frozenset[str] = frozenset()) -> Callable[[], answer_text.Detokenizer]:
        """Makes a detokenizer; special tokens whose text is in `keep` are shown."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return Ids
        kept = frozenset(i for text in keep if (i := tokenizer.backend.token_to_id(text)) is not None)
        return lambda: Detokenizer(tokenizer, keep=kept)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special=False)

    @cached_property
    def _token_chars(self) -> int:
        """Characters that a token stands for at most."""
        return max(map(len, self._needed().backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _byte_level(self) -> bool:
        """Tokens are written in GPT-2's alphabet of bytes."""
        decoder = self._needed().backend.decoder  # its own state: the whole tokenizer as text would take a second
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def token_text(self) -> Callable[[int], tuple[str, tuple[int, ...]]]:
        """A token's text, and its bytes, which need not be whole characters."""
        return lru_cache(maxsize=65_536)(self._token_text)

    def _token_text(self, token: int) -> tuple[str, tuple[int, ...]]:
        if self.tokenizer is None:
            return str(token), tuple(str(token).encode())
        piece = self.tokenizer.backend.id_to_token(token) or ""
        text = self.tokenizer.decode([token], skip_special=False)
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, (int(piece[3:5], 16),)
        added = token in self._added
        if self._byte_level and not added and all(char in _BYTE_OF for char in piece):
            return text, tuple(_BYTE_OF[char] for char in piece)
        if not added and piece.startswith("▁") and not text.startswith(" "):
            text = " " + text  # decoders drop the first space of a text
        return text, tuple(text.encode())

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._needed().backend.get_added_tokens_decoder())

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad("this model has no tokenizer.json; give token ids to /v1/completions")
        return self.tokenizer


def too_long(count: str, longest: int, param: str) -> Problem:
    """OpenAI's code for it is what clients look for."""
    text = f"the prompt has {count} tokens and prompt and answer may have {longest:,} together; shorten it"
    return bad(text, param, "context_length_exceeded")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    found = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
