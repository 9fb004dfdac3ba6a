"""Tokenization in the server's process; long texts in threads, so that the event loop stays free.

Prompts have their own threads; /tokenize and /detokenize, on which no completion waits, share another one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from armillary.engine.output.output_text import Detokenizer as ChoiceDetokenizer
from armillary.engine.request.token_limits import bad_tokens_of
from armillary.errors import ArmillaryError, ContextLengthExceeded
from armillary.model.text.tokenizer import Detokenizer, Tokenizer
from armillary.serving.http.problem import Problem, bad_request

T = TypeVar("T")
_THREADS = 4
_MAX_TOKENIZE_ONLY = 16
"""requests to /tokenize and /detokenize that may wait for their thread"""
_INLINE_CHARS = 4_000
"""texts up to this length are encoded in the event loop: a thread would take longer"""
_MESSAGE_CHARS, _TOOL_CHARS = 20, 100
"""characters that encode in about the time that a chat template takes per message and per tool"""
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_NOT_PRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_NOT_PRINTABLE)}
"""GPT-2's byte alphabet: printable bytes stand for themselves, the others for characters from U+0100 on"""


class TokenIdText:
    """Detokenizer of a model without a tokenizer: the text is the token ids."""

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


class Tokenization:
    """The served model's tokenizer, if it has one, and the threads that run it."""

    def __init__(self, folder: Path, eos_ids: Sequence[int]) -> None:
        has_text = (folder / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(folder) if has_text else None
        templates = self.tokenizer.templates.values() if self.tokenizer else ()
        self.knows_developer = any("developer" in template for template in templates)
        self.eos_ids = frozenset(self.tokenizer.eos_ids if self.tokenizer else eos_ids)
        self._prompts = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        self._tokenize_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_tokenize_only = 0
        if self.tokenizer is not None:
            _ = self._token_chars  # reads the complete vocabulary, so not during the first request

    async def work(self, do: Callable[[], T], *, tokenize_only: bool) -> T:
        """Run `do` in a thread; `tokenize_only`: no completion waits for it."""
        loop = asyncio.get_running_loop()
        if not tokenize_only:
            return await loop.run_in_executor(self._prompts, do)
        if self._num_tokenize_only >= _MAX_TOKENIZE_ONLY:
            raise Problem(
                429,
                "too many texts wait to be tokenized; try again later",
                code="rate_limit_exceeded",
                retry_after_s=2,
            )
        self._num_tokenize_only += 1
        try:
            return await loop.run_in_executor(self._tokenize_thread, do)
        finally:
            self._num_tokenize_only -= 1

    async def encode(
        self, text: str, longest: int, param: str, *, special: bool = True, tokenize_only: bool = False
    ) -> list[int]:
        """Token ids of a text; a text that must have more than `longest` tokens is refused unread."""
        tokenizer = self._needed()
        if len(text) > longest * self._token_chars:
            raise _too_long(longest, param)
        try:
            if len(text) <= _INLINE_CHARS:
                return tokenizer.encode(text, special=special)
            return await self.work(partial(tokenizer.encode, text, special=special), tokenize_only=tokenize_only)
        except ArmillaryError as error:
            raise bad_request(str(error), param) from None

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
        tokenize_only: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template or the request's own."""
        tokenizer, size = self._needed(), sum(len(str(message.get("content") or "")) for message in messages)
        if size > longest * self._token_chars:
            raise _too_long(longest, "messages")

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
            size += _MESSAGE_CHARS * len(messages) + _TOOL_CHARS * len(tools or ())
            text = (
                render()
                if size <= _INLINE_CHARS and template is None
                else await self.work(render, tokenize_only=tokenize_only)
            )
        except ArmillaryError as error:
            raise bad_request(str(error), "messages") from None
        except TypeError:
            raise bad_request(
                "chat_template_kwargs names a variable that the server sets; leave it out", "chat_template_kwargs"
            ) from None
        return await self.encode(text, longest, "messages", special=False, tokenize_only=tokenize_only)

    def detokenizer(
        self, visible: frozenset[str] = frozenset(), *, skip_special: bool = True
    ) -> Callable[[], ChoiceDetokenizer]:
        """Factory of detokenizers that skip special tokens, except those whose text is in `visible`."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return TokenIdText
        ids = frozenset(i for text in visible if (i := tokenizer.backend.token_to_id(text)) is not None)
        return lambda: Detokenizer(tokenizer, skip_special=skip_special, include=ids)

    def bad_tokens(self, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words that must not be generated."""
        if not words:
            return ()
        if not all(word.strip() for word in words):
            raise bad_request("bad_words has a word of only white space; leave it out", "bad_words")
        try:
            return bad_tokens_of(self._needed(), tuple(words))
        except ArmillaryError as error:
            raise bad_request(str(error), "bad_words") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        # decode_batch releases the GIL
        text: str = self.tokenizer.backend.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token."""
        return [self.token_text(token)[0] for token in ids]

    @cached_property
    def _token_chars(self) -> int:
        """Length of the longest token in characters."""
        return max(map(len, self._needed().backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether tokens are written in GPT-2's byte alphabet."""
        decoder = self._needed().backend.decoder  # its state only: serializing the tokenizer takes a second
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def token_text(self) -> Callable[[int], tuple[str, tuple[int, ...]]]:
        """A token's text and bytes; the bytes need not be complete characters."""
        return lru_cache(maxsize=65_536)(self._token_text)

    def _token_text(self, token: int) -> tuple[str, tuple[int, ...]]:
        if self.tokenizer is None:
            return str(token), tuple(str(token).encode())
        piece = self.tokenizer.backend.id_to_token(token) or ""
        text = self.tokenizer.decode([token], skip_special=False)
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, (int(piece[3:5], 16),)
        added = token in self._added_ids
        if self._byte_level and not added and all(char in _BYTE_OF for char in piece):
            return text, tuple(_BYTE_OF[char] for char in piece)
        if not added and piece.startswith("▁") and not text.startswith(" "):
            text = " " + text  # decoders drop the leading space of a text
        return text, tuple(text.encode())

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._needed().backend.get_added_tokens_decoder())

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer.json; give token ids to /v1/completions")
        return self.tokenizer


def _too_long(longest: int, param: str) -> Problem:
    text = f"the prompt has more than the {longest:,} tokens that prompt and completion may have; shorten it"
    return bad_request(text, param, ContextLengthExceeded.code)
