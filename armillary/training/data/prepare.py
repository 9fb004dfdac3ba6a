"""`prepare`: a source of text becomes a folder of token shards with its tokenizer, whole or not at all.

Two passes stream the text: one surveys it (sizes, held-out documents, a sample for the tokenizer), one encodes it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from armillary.errors import ArmillaryError, BadInput, BadModel
from armillary.model.bpe import LARGEST, SMALLEST, train_tokenizer
from armillary.model.tokenizer import Tokenizer
from armillary.store.atomic import Taken, staged_folder
from armillary.training.data.corpus import Corpus, find_corpus
from armillary.training.data.index import NAME, SPLITS, Index, Split
from armillary.training.data.readers import Document
from armillary.training.data.shards import SHARD_TOKENS, ShardWriter, TokenShards
from armillary.training.data.survey import Progress, Survey, survey

SAMPLE_BYTES = 8_000_000
"""text a tokenizer is trained on at most; more of it changes few merges and takes longer"""
_BATCH_BYTES = 1_000_000
_NAMED_SKIPPED = 20


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made, or found made already."""

    folder: Path
    """where the shards are"""
    index: Index
    """what is in them"""
    reused: bool
    """whether the folder was there already, from the same source and settings"""
    seconds: float
    """time this call took"""

    @property
    def num_tokens(self) -> int:
        return sum(self.index.num_tokens(split) for split in SPLITS)

    @property
    def num_documents(self) -> int:
        return sum(self.index.num_documents(split) for split in SPLITS)

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for: higher is a better fit of the tokenizer."""
        return self.index.text_bytes / self.num_tokens


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    vocab: int = 8192,
    tokenizer: str | Path | None = None,
    key: str = "text",
    held_out: float = 0.01,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Prepared:
    """Turn `source` into token shards in `out`, with a BPE of `vocab` ids trained on it or the given tokenizer folder.

    A finished folder from the same source and settings is used again; another one is replaced only on `overwrite`.
    """
    begin = time.monotonic()
    _check(vocab, held_out, seed)
    corpus, out = find_corpus(source, key=key), Path(out)
    given = _given(tokenizer) if tokenizer is not None else None
    wanted = {
        "source": corpus.source,
        "files": corpus.fingerprint(),
        "tokenizer": given.fingerprint if given else vocab,
        "held_out": held_out,
        "seed": seed,
        "shard_tokens": shard_tokens,
    }
    index = _finished(out, wanted, overwrite=overwrite)
    reused = index is not None
    if index is None:
        try:
            with staged_folder(out, overwrite=overwrite) as folder:
                index = _make(corpus, folder, given, vocab, wanted, progress)
        except Taken:  # another process was quicker; what it made may be just what was asked for
            index = _finished(out, wanted, overwrite=False)
            assert index is not None
            reused = True
    return Prepared(folder=out, index=index, reused=reused, seconds=time.monotonic() - begin)


def folder_name(
    source: str | Path,
    *,
    vocab: int = 8192,
    tokenizer: str | Path | None = None,
    key: str = "text",
    held_out: float = 0.01,
    seed: int = 0,
) -> str:
    """A name for the shards of a source: readable, and different where the settings are."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).name).strip("-.") or "text"
    name = f"{stem}-{Path(tokenizer).name if tokenizer else vocab}"
    if (str(source), tokenizer, key, held_out, seed) == ("stdlib", None, "text", 0.01, 0):
        return name
    where = "stdlib" if str(source) == "stdlib" else str(Path(source).absolute())
    settings = [where, str(Path(tokenizer).absolute()) if tokenizer else vocab, key, held_out, seed]
    return f"{name}-{blake2b(repr(settings).encode(), digest_size=3).hexdigest()}"


def _check(vocab: int, held_out: float, seed: int) -> None:
    if vocab < SMALLEST:
        raise BadInput(f"a vocabulary of {vocab} is below the {SMALLEST} of byte-level BPE; try --vocab 8192")
    if vocab > LARGEST:
        raise BadInput(f"a vocabulary of {vocab:,} is more than the {LARGEST:,} we train; try --vocab 131072")
    if not 0 <= held_out <= 0.5:
        raise BadInput(f"held_out={held_out} is not a fraction between 0 and 0.5; 0.01 holds out one document in 100")
    if not 0 <= seed < 2**63:
        raise BadInput(f"seed={seed} is not between 0 and 2^63; use a small whole number")


def _given(folder: str | Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    if tokenizer.eos_id is None:
        raise BadModel(f"the tokenizer in {folder} has no eos_token; name one in its tokenizer_config.json")
    return tokenizer


# --- a folder that is there already


def _finished(out: Path, wanted: Mapping[str, Any], *, overwrite: bool) -> Index | None:
    """The index of a usable folder made from `wanted`; None where the folder is to be made."""
    if not out.exists():
        return None
    if not (out / NAME).is_file():
        if out.is_dir() and not any(out.iterdir()):
            raise BadInput(f"{out} is an empty folder; remove it or choose another name")
        raise BadInput(f"{out} is there and holds no token data, so it is never overwritten; choose another name")
    try:
        for split in SPLITS:
            index = TokenShards.open(out, split).index
    except ArmillaryError:
        if overwrite:
            return None
        raise
    differing = [name for name in wanted if index.made_from.get(name) != wanted[name]]
    if differing and not overwrite:
        raise BadInput(f"{out} was made with {_difference(index, wanted, differing[0])}; add --overwrite to replace it")
    return None if differing else index


def _difference(index: Index, wanted: Mapping[str, Any], name: str) -> str:
    if name == "files":
        return f"an earlier state of {wanted['source']}"
    return f"another {name} ({index.made_from.get(name)}, now {wanted[name]})"


# --- making one


def _make(
    corpus: Corpus, folder: Path, given: Tokenizer | None, vocab: int, settings: Mapping[str, Any], progress: Progress
) -> Index:
    found = survey(
        corpus,
        held_out=settings["held_out"],
        seed=settings["seed"],
        sample_bytes=0 if given else SAMPLE_BYTES,
        progress=progress,
    )
    tokenizer = given or _trained(found, vocab, progress)
    tokenizer.save(folder / "tokenizer")
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    with ExitStack() as stack:
        limit = settings["shard_tokens"]
        writers = {s: stack.enter_context(ShardWriter(folder, s, dtype, shard_tokens=limit)) for s in SPLITS}
        _encode(corpus, found, tokenizer, writers, progress)
    index = Index(
        dtype=dtype,
        vocab=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.fingerprint,
        splits={split: tuple(writers[split].shards) for split in SPLITS},
        text_bytes=found.text_bytes,
        num_skipped=len(found.skipped),
        skipped=tuple(f"{item.origin}: {item.why}" for item in found.skipped[:_NAMED_SKIPPED]),
        made_from=settings,
    )
    index.write(folder)
    return index


def _trained(found: Survey, vocab: int, progress: Progress) -> Tokenizer:
    progress(0, 1, "training the tokenizer")
    tokenizer = train_tokenizer(found.sample, vocab)
    progress(1, 1, "training the tokenizer")
    return tokenizer


def _encode(
    corpus: Corpus, found: Survey, tokenizer: Tokenizer, writers: Mapping[Split, ShardWriter], progress: Progress
) -> None:
    done = 0
    for batch in _batched(corpus):
        for document, ids in zip(batch, tokenizer.encode_documents([item.text for item in batch]), strict=True):
            writers["validation" if found.is_held_out(document) else "train"].add(ids)
        done += sum(len(document.text.encode()) for document in batch)
        progress(min(done, found.text_bytes), found.text_bytes, "encoding")


def _batched(corpus: Corpus) -> Iterator[list[Document]]:
    """Documents in groups large enough to keep all cores busy, small enough to hold."""
    batch: list[Document] = []
    size = 0
    for item in corpus.documents():
        if isinstance(item, Document):
            batch.append(item)
            size += len(item.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
