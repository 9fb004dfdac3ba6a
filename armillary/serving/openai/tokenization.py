"""From texts and chats to token ids and back, in the server's process; long ones in a thread, so that nobody waits.

Prompts have threads of their own: /tokenize and /detokenize, which nobody's answer waits for, share another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from armillary.engine.request.token_limits import bad_tokens_of
from armillary.errors import ArmillaryError
from armillary.model.text.tokenizer import Detokenizer, Tokenizer
from armillary.serving.http.problem import Problem, bad
from armillary.serving.openai import detokenize as answer_text

T = TypeVar("T")
_THREADS = 4
_MOST_ASIDE = 16
"""requests to /tokenize and /detokenize that may wait for their thread"""
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
        self._prompts = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        self._others = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._aside = 0
        """requests that wait for the other thread, or are in it"""
        if self.tokenizer is not None:
            _ = self._token_chars  # goes through the whole vocabulary: not when the first request comes

    async def work(self, do: Callable[[], T], *, aside: bool) -> T:
        """Do something long beside the event loop; `aside`: nobody's answer waits for it."""
        loop = asyncio.get_running_loop()
        if not aside:
            return await loop.run_in_executor(self._prompts, do)
        if self._aside >= _MOST_ASIDE:
            raise Problem(
                429,
                "too many texts wait for their tokens; try again later",
                code="rate_limit_exceeded",
                retry_after_s=2,
            )
        self._aside += 1
        try:
            return await loop.run_in_executor(self._others, do)
        finally:
            self._aside -= 1

    async def encode(
        self, text: str, longest: int, param: str, *, special: bool = True, aside: bool = False
    ) -> list[int]:
        """Ids of a text; one that is certainly longer than `longest` tokens is refused unread."""
        tokenizer = self._needed()
        if len(text) > longest * self._token_chars:
            raise too_long(f"more than {longest:,}", longest, param)
        try:
            if len(text) <= _INLINE:
                return tokenizer.encode(text, special=special)
            return await self.work(partial(tokenizer.encode, text, special=special), aside=aside)
        except ArmillaryError as error:
            raise bad(str(error), param) from None

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        longest: int,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        aside: bool = False,
    ) -> list[int]:
        """Ids of a conversation, by the model's chat template or the request's own."""
        tokenizer, size = self._needed(), sum(len(str(message.get("content") or "")) for message in messages)
        if size > longest * self._token_chars:
            raise too_long(f"more than {longest:,}", longest, "messages")

        def render() -> str:
            return tokenizer.chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final=continue_final,
                template=template,
                **(variables or {}),
            )

        try:
            work = size + _MESSAGE * len(messages) + _TOOL * len(tools or ())
            text = render() if work <= _INLINE and template is None else await self.work(render, aside=aside)
        except ArmillaryError as error:
            raise bad(str(error), "messages") from None
        except TypeError:
            raise bad(
                "chat_template_kwargs names a variable that the server sets; leave it out", "chat_template_kwargs"
            ) from None
        return await self.encode(text, longest, "messages", special=False, aside=aside)

    def detokenizer(
        self, keep: frozenset[str] = frozenset(), *, skip_special: bool = True
    ) -> Callable[[], answer_text.Detokenizer]:
        """Makes a detokenizer; special tokens are left out, but for those whose text is in `keep`."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return Ids
        kept = frozenset(i for text in keep if (i := tokenizer.backend.token_to_id(text)) is not None)
        return lambda: Detokenizer(tokenizer, skip_special=skip_special, keep=kept)

    def bad_tokens(self, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """The tokens of words that may not come."""
        if not words:
            return ()
        if not all(word.strip() for word in words):
            raise bad("bad_words has a word of nothing but space; leave it out", "bad_words")
        try:
            return bad_tokens_of(self._needed(), tuple(words))
        except ArmillaryError as error:
            raise bad(str(error), "bad_words") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        # of several at once the library decodes without holding the interpreter
        found: str = self.tokenizer.backend.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return found

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each of them."""
        return [self.token_text(token)[0] for token in ids]

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
