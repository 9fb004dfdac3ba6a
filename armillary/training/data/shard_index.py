"""The index of a folder of token shards: what is in each file, and what it was made from.

`index.json` is written last; a folder without it is not token data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from armillary.errors import BadData, BadInput, NotFound
from armillary.spec.toml.fields import build, to_plain
from armillary.store import atomic, nan_safe_json
from armillary.store.remote import Remote

VERSION = 1
NAME = "index.json"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The ids of some documents one after another in `file` (relative to the folder), and in the same place, with
    suffix .idx, where each starts: documents + 1 numbers (uint64), the last one being the number of tokens. With
    suffix .msk, a byte per token: 1 where it is to be learnt; without a checksum of it there is none, and all are. No
    document continues in another shard."""

    file: str
    tokens: int
    documents: int
    sha256: str
    offsets_sha256: str
    answers_sha256: str = ""

    @property
    def offsets_file(self) -> str:
        return str(Path(self.file).with_suffix(".idx"))

    @property
    def answers_file(self) -> str:
        return str(Path(self.file).with_suffix(".msk"))


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything about a folder of shards but the ids: their dtype (little endian, the smaller one where the
    vocabulary fits; ids are below `vocab`), the checksum of tokenizer/tokenizer.json, the shards of both splits, the
    size of the text in UTF-8, files that could not be read as text (the first of them with the reason), and the
    source and settings it was made from, by which it need not be prepared again."""

    version: int = VERSION
    dtype: Literal["uint16", "uint32"]
    vocab: int
    tokenizer_sha256: str
    splits: Mapping[str, tuple[Shard, ...]]
    text_bytes: int
    num_skipped: int
    skipped: tuple[str, ...] = ()
    made_from: Mapping[str, Any]

    def num_tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.splits[split])

    def num_documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.splits[split])

    def write(self, folder: Path) -> None:
        atomic.write_json(folder / NAME, to_plain(self))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder, checked for version and shape."""
        if not (folder / NAME).is_file():
            raise NotFound(f"no token data in {folder}; make it with: armillary data prepare SOURCE --out {folder}")
        return cls._parse(nan_safe_json.read_table(folder / NAME), str(folder))

    @classmethod
    def fetch(cls, folder: Remote) -> Index:
        """The index of a folder in a store, as it is now."""
        text = b"".join(folder.read(NAME))
        try:
            table = nan_safe_json.loads(text)
        except ValueError as error:
            raise BadData(f"{folder.address(NAME)} is not readable JSON ({error}); upload it again") from None
        if not isinstance(table, dict):
            raise BadData(f"{folder.address(NAME)} holds no JSON object; upload it again")
        return cls._parse(table, str(folder))

    @classmethod
    def _parse(cls, table: Mapping[str, Any], folder: str) -> Index:
        if table.get("version") != VERSION:
            version = table.get("version")
            raise BadData(f"{folder} has token format {version}, this program reads {VERSION}; prepare the data again")
        try:
            index = build(cls, table, NAME)
        except BadInput as error:
            raise BadData(f"{folder}/{NAME} is damaged ({error}); prepare the data again") from None
        if set(index.splits) != set(SPLITS):
            raise BadData(f"{folder}/{NAME} is damaged (splits {sorted(index.splits)}); prepare the data again")
        return index
