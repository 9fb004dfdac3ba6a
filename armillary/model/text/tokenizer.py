"""Text to token ids and back, from the tokenizer files of a Hugging Face folder.

`Tokenizer` follows tokenizer.json as transformers does; `Detokenizer` streams text one token at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from armillary.errors import BadInput, BadModel, NotFound, one_line
from armillary.model.generation_config import read_json
from armillary.model.text import chat_template as chat

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A vocabulary with its special tokens and chat templates."""

    backend: tokenizers.Tokenizer = field(repr=False)
    """the Rust tokenizer, without truncation or padding"""
    special_tokens: Mapping[str, str]  # bos_token, eos_token, pad_token … as text
    eos_ids: tuple[int, ...] = ()
    """ids that end a generation; the tokenizer's own end of text comes first"""
    templates: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as it was read; `save` writes it back"""

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer in a Hugging Face folder.

        transformers 5 rebuilds a few old classes (LlamaTokenizer) in code instead: where their tokenizer.json prepends
        ▁ in a normalizer, texts that begin with a space get one token fewer there.
        """
        folder = Path(folder)
        backend = _backend(folder)
        config = read_json(folder / "tokenizer_config.json")
        # newer folders keep everything in tokenizer_config.json; a special_tokens_map.json there is a leftover
        tokens = config if "added_tokens_decoder" in config else config | read_json(folder / "special_tokens_map.json")
        special_tokens = {
            key: text for key, value in tokens.items() if key.endswith("_token") and (text := _text(value))
        }
        _add_lacking(backend, _listed(config, folder), special_tokens, tokens)
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        return cls(
            backend=backend,
            special_tokens=special_tokens,
            eos_ids=_eos_ids(backend.token_to_id(special_tokens.get("eos_token", "")), ends),
            templates=chat.read_templates(folder, config),
            config=config,
        )

    def save(self, folder: str | Path) -> None:
        """Write files that `load` and transformers read; a generation_config.json already there is left alone."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._serialised, encoding="utf-8")
        config = {key: value for key, value in self.config.items() if key != "chat_template"} | dict(
            self.special_tokens
        )
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if list(self.templates) == ["default"]:
            config["chat_template"] = self.templates["default"]
        elif self.templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.templates.items()]
        _write_json(folder / "tokenizer_config.json", config)
        ids = {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids) or None, "pad_token_id": self.pad_id}
        if self.eos_ids and not (folder / "generation_config.json").exists():
            _write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; `special` adds the tokenizer's special tokens around a text (bos). A rendered chat has them
        already."""
        return self._encode_batch(self.backend, [text], special)[0]

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a rendered chat, and the characters (from, to) of each."""
        try:
            encoding = self.backend.encode(text, add_special_tokens=False)
        except TypeError:
            raise BadInput("only valid Unicode text has tokens; remove lone surrogates (U+D800 to U+DFFF)") from None
        return encoding.ids, encoding.offsets

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of complete documents on all cores, each closed by the end of text.

        The text of a special token inside a document is plain text here: data cannot forge a document end.
        """
        assert self.eos_id is not None
        batches = self._encode_batch(self._plain_backend, texts, True)
        return [ids if ids and ids[-1] == self.eos_id else [*ids, self.eos_id] for ids in batches]

    @staticmethod
    def _encode_batch(backend: tokenizers.Tokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
        try:
            return [item.ids for item in backend.encode_batch_fast(list(texts), add_special_tokens=special)]
        except TypeError:
            raise BadInput("only valid Unicode text has tokens; remove lone surrogates (U+D800 to U+DFFF)") from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode([int(item) for item in ids], skip_special_tokens=skip_special))

    def chat(
        self,
        messages: Sequence[chat.Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        marks: tuple[str, str] | None = None,
        continue_final: bool = False,
        template: str | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for a conversation; encode it with `special=False`, the template writes its own bos. `marks` are
        put around the parts that the template marks as the assistant's; `continue_final` leaves the last message open;
        `template` replaces the tokenizer's own."""
        source = chat.pick(self.templates, tools=tools) if template is None else template
        variables = dict(self.special_tokens) | extra
        return chat.render(
            source,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            marks=marks,
            continue_final=continue_final,
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included: the fewest rows of an embedding."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json that `save` writes: equal tokenizers have equal fingerprints."""
        return hashlib.sha256(self._serialised.encode()).hexdigest()

    @property
    def bos_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The end of a document; `eos_ids` may hold more ids that end a generation."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def pad_id(self) -> int | None:
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None

    @cached_property
    def _serialised(self) -> str:
        return str(self.backend.to_str(pretty=True))

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._serialised)
        copy.encode_special_tokens = True
        return copy


class Detokenizer:
    """Streaming detokenizer: `push` an id, get the text that is now final; never half a character.

    Each piece is decoded together with the one before it, because a decoder may treat the first token differently (a
    leading space). All pieces joined, with `finish()`, equal one decode of all ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, include: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens are left out, except those in `include`."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - include if skip_special else frozenset[int]()
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Text that `token` completes, often ''."""
        if token in self._skip:
            return ""
        self._pending.append(token)
        # a byte token may belong to a longer run, which decodes as a whole; U+FFFD may be a character's first half
        if _BYTE.fullmatch(self._tokenizer.backend.id_to_token(token) or ""):
            return ""
        text = self._new_text()
        return "" if not text or text.endswith("\ufffd") else self._take(text)

    def finish(self) -> str:
        """The text that was held back, broken characters included."""
        return self._take(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special=False)
        return self._tokenizer.decode(self._before + self._pending, skip_special=False)[len(before) :]

    def _take(self, text: str) -> str:
        if self._pending:
            self._before, self._pending = self._pending, []
        return text


# --- reading a folder


def eos_ids_of(folder: Path) -> tuple[int, ...]:
    """End tokens of a model without a tokenizer, from its generation_config.json or config.json."""
    ends = read_json(folder / "generation_config.json").get("eos_token_id")
    return _eos_ids(None, read_json(folder / "config.json").get("eos_token_id") if ends is None else ends)


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFound(f"no tokenizer.json in {folder}; give a Hugging Face folder that has one")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the Rust library raises bare Exception for what it cannot parse, or panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise BadModel(f"{path} cannot be read ({one_line(error)}); fetch the folder again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    """A token written as text, or as a table with its text under `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""


def _listed(config: Mapping[str, Any], folder: Path) -> list[tuple[Any, bool]]:
    """Tokens of added_tokens_decoder (a table from id to token) by id, and whether each is special."""
    table = config.get("added_tokens_decoder") or {}
    try:
        return [(table[key], bool(table[key].get("special"))) for key in sorted(table, key=int)]
    except (AttributeError, TypeError, ValueError):
        path = folder / "tokenizer_config.json"
        raise BadModel(f"{path}: added_tokens_decoder is no table of tokens by id; fetch the folder again") from None


def _add_lacking(
    backend: tokenizers.Tokenizer,
    listed: list[tuple[Any, bool]],
    special_tokens: Mapping[str, str],
    tokens: Mapping[str, Any],
) -> None:
    """Add tokens that the configuration names and tokenizer.json lacks, with the next free ids, in transformers'
    order."""
    extra = tokens.get("extra_special_tokens") or tokens.get("additional_special_tokens") or ()
    extra = extra.values() if isinstance(extra, Mapping) else extra
    first = [special_tokens[name] for name in _SPECIAL_NAMES if name in special_tokens]
    wanted = [*listed, *((token, True) for token in [*first, *special_tokens.values(), *extra])]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token, special in wanted:
        text = _text(token)
        if not text or text in known:
            continue
        known.add(text)
        keys = ("single_word", "lstrip", "rstrip", "normalized")
        flags = {key: token[key] for key in keys if key in token} if isinstance(token, Mapping) else {}
        backend.add_tokens([tokenizers.AddedToken(text, special=special, **flags)])


def _eos_ids(own: int | None, ends: Any) -> tuple[int, ...]:
    more = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return tuple(dict.fromkeys(item for item in [own, *more] if isinstance(item, int)))
