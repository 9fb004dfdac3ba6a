"""Folders of shards made by hand: known ids, no text."""

from collections.abc import Callable, Sequence

import pytest

from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.shard_index import SPLITS, Index
from armillary.training.data.shards import ShardWriter, TokenShards


@pytest.fixture(scope="session")
def make_shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TokenShards]:
    """Writes documents (lists of ids) as the training split of a new folder and opens it."""
    tokenizer = train_tokenizer([], 300)

    def make(
        documents: Sequence[Sequence[int]],
        *,
        answers: Sequence[Sequence[bool]] | None = None,
        shard_tokens: int = 10,
        dtype: str = "uint16",
    ) -> TokenShards:
        folder = tmp_path_factory.mktemp("shards")
        tokenizer.save(folder / "tokenizer")
        splits = {}
        for split in SPLITS:
            with ShardWriter(folder, split, dtype, shard_tokens=shard_tokens) as writer:
                for number, ids in enumerate(documents if split == "train" else ()):
                    writer.add(ids, answers[number] if answers is not None else None)
            splits[split] = tuple(writer.shards)
        about = {"text_bytes": 0, "num_skipped": 0, "made_from": {}, "tokenizer_sha256": tokenizer.fingerprint}
        Index(dtype=dtype, vocab=2 ** (16 if dtype == "uint16" else 32), splits=splits, **about).write(folder)
        return TokenShards.open(folder, "train")

    return make
