"""From the recipe's [data] table to what a trainer reads: find the sources, prepare what is text, open what is shards.

Text is prepared once, into the store; a source that is a folder of shards already, here or at a URL, is read as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData, BadInput, NotFound
from armillary.spec.tables.train import Data, TrainJob, shares
from armillary.store.atomic import staged_folder
from armillary.store.home import Home
from armillary.store.remote import Remote, is_url
from armillary.training.data.batch import BatchSource
from armillary.training.data.batch_sources import Batches, Blend, HeldOut, SourceOrder, Validation
from armillary.training.data.corpus import find_corpus
from armillary.training.data.corpus_survey import Progress, survey
from armillary.training.data.inspect_shards import document_lengths
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.row_packing import Packing
from armillary.training.data.shard_index import NAME, SPLITS
from armillary.training.data.shards import TokenShards
from armillary.training.data.tokenize_corpus import SAMPLE_BYTES, trained
from armillary.training.prepare_data import Prepared, folder_name, prepare
from armillary.units import bytes_text

_GOLDEN = 0x9E3779B97F4A7C15
_OFTEN = 4
_SILENT: Progress = lambda done, total, what: None  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class OpenData:
    """What a trainer reads; token ids are below `vocab`, and `notes` are for the user, a sentence each."""

    train: BatchSource
    validation: Validation
    tokenizer_folder: Path
    vocab: int
    notes: tuple[str, ...] = ()


# --- planning: where everything is or will be


def plan_data(data: Data, home: Home, *, vocab: int, tokenizer: Path | None) -> Data:
    """The table with folders, tokenizer and vocabulary resolved, so that all ranks find the same. Text that is missing
    is an error now."""
    data = replace(data, cache=data.cache or str(home.cache / "fetched"), vocab=vocab)
    if data.blend and tokenizer is None:
        tokenizer = _tokenizer_of_blend(data, home)  # sources must share one
    data = replace(data, tokenizer=str(tokenizer or ""))
    if not data.blend:
        return replace(data, path=data.path or _folder(data.source, data, home))
    return replace(data, paths=data.paths or tuple(_folder(source, data, home) for source in _sources(data)))


def _sources(data: Data) -> list[str]:
    return [source for source, _ in shares(data.blend)] if data.blend else [data.source]


def _folder(source: str, data: Data, home: Home) -> str:
    if is_prepared(source):
        return source
    folder = home.data / folder_name(source, **_settings(data))
    if not folder.exists():
        find_corpus(source, key=data.key, cache=_cache(data))
    return str(folder)


def is_prepared(source: str) -> bool:
    """Whether a source is a folder of token shards already."""
    if is_url(source):
        return Remote(url=source.rstrip("/")).exists(NAME)
    return (Path(source) / NAME).is_file()


def _tokenizer_of_blend(data: Data, home: Home) -> Path:
    """That of the first prepared source, or one to be trained on all of them."""
    for source in _sources(data):
        if is_prepared(source):
            return TokenShards.open(source, cache=_cache(data)).tokenizer_folder
    facts = repr((shares(data.blend), data.vocab, data.key, data.seed))
    return home.data / f"tokenizer-{data.vocab}-{blake2b(facts.encode(), digest_size=4).hexdigest()}"


def _settings(data: Data) -> dict[str, Any]:
    names = ("vocab", "key", "held_out", "seed", "shuffle", "format", "template")
    return {"tokenizer": data.tokenizer or None} | {name: getattr(data, name) for name in names if hasattr(data, name)}


def _cache(data: Data) -> Cache | None:
    return Cache(folder=Path(data.cache), limit_bytes=data.cache_bytes) if data.cache else None


def may_hold_out(data: Data) -> bool:
    """Whether some text could be held out; for shards that are prepared already, this is known only after opening."""
    return data.held_out > 0 or bool(data.path or data.paths) or any(is_prepared(source) for source in _sources(data))


# --- preparing what is text


def prepare_data(asked: Data, planned: Data, progress: Progress = _SILENT) -> tuple[Prepared, ...]:
    """The text of each source as shards, made now or earlier. A folder of the store is rebuilt when the text has
    changed; one that the user chose is left alone."""
    by_user = bool(asked.path or asked.paths)
    folders = planned.paths or (planned.path,)
    todo = [(source, folder) for source, folder in zip(_sources(planned), folders, strict=True) if source != folder]
    if asked.path and asked.source == Data.source and is_prepared(asked.path):
        return ()  # a folder of shards was named, and no text
    for _, folder in todo:
        if is_url(folder):
            raise NotFound(f"no token data in {folder}; upload a folder that armillary data prepare has made")
    if todo and planned.tokenizer and not Path(planned.tokenizer).exists():
        _train_shared(planned, progress)
    settings = _settings(planned) | {"cache": _cache(planned)}
    return tuple(
        prepare(source, folder, **settings, overwrite=not by_user, progress=progress) for source, folder in todo
    )


def _train_shared(data: Data, progress: Progress) -> None:
    """A tokenizer for a blend, trained on a sample of each source in the blend's proportion."""
    counts = shares(data.blend)
    texts: list[str] = []
    for source, count in counts:
        corpus = find_corpus(source, key=data.key, cache=_cache(data))
        share = max(1, SAMPLE_BYTES * count // sum(count for _, count in counts))
        texts += survey(corpus, held_out=data.held_out, seed=data.seed, sample_bytes=share, progress=progress).sample
    assert data.vocab is not None
    with staged_folder(Path(data.tokenizer), overwrite=True) as folder:
        trained(texts, data.vocab, progress).save(folder)


# --- opening shards


def open_data(data: Data, job: TrainJob) -> OpenData:
    """The planned table opened for reading; missing and damaged files are named."""
    opened, held_out = (
        [
            TokenShards.open(folder, split, cache=_cache(data), verify=data.verify)
            for folder in data.paths or (data.path,)
        ]
        for split in SPLITS
    )
    _check_tokenizers(opened)
    _check_cache_size([shards for shards in (*opened, *held_out) if isinstance(shards.folder, Remote)], data)
    counts = tuple(count for _, count in shares(data.blend)) if data.blend else (1,)
    rows = job.batch_tokens // job.sequence
    parts = tuple(
        Batches(
            shards=shards,
            sequence=job.sequence,
            batch=rows,
            seed=data.seed + number * _GOLDEN,  # or sources of one size would be read in one order
            packing=_packing(shards, data),
            mix=data.mix_shards,
        )
        for number, shards in enumerate(opened)
    )
    with_text = [(shards, count) for shards, count in zip(held_out, counts, strict=True) if shards.num_tokens > 1]
    return OpenData(
        train=parts[0] if len(parts) == 1 else Blend(parts=parts, order=SourceOrder(counts=counts), batch=rows),
        validation=Validation(
            parts=tuple(HeldOut(shards=s, sequence=job.sequence, packing=_packing(s, data)) for s, _ in with_text),
            counts=tuple(count for _, count in with_text),
        ),
        tokenizer_folder=opened[0].tokenizer_folder,
        vocab=opened[0].index.vocab,
        notes=(*_cut(opened, job.sequence), *_repeated(parts, counts, job)),
    )


def _check_cache_size(stores: list[TokenShards], data: Data) -> None:
    """Stores that the cache cannot hold are read group by group; two groups of each must fit, one in use and one on
    its way, or the same shards would be fetched over and over."""
    need = sum(_need(shards, data.mix_shards) for shards in stores)
    if need <= data.cache_bytes:
        return
    fits = next((mix for mix in (64, 16, 8, 4, 2, 1) if sum(_need(s, mix) for s in stores) <= data.cache_bytes), None)
    hint = f"data.mix_shards={fits}, or a larger data.cache_bytes" if fits else f"data.cache_bytes={2 * need}"
    shards = f"{bytes_text(need)} of {stores[0].folder}" + (" and other stores" if len(stores) > 2 else "")
    raise BadInput(f"{shards} do not fit into the cache of {bytes_text(data.cache_bytes)}; try --set {hint}")


def _need(shards: TokenShards, mix: int) -> int:
    sizes = sorted((shards.files.num_bytes(number) for number in range(shards.num_shards)), reverse=True)
    return sum(sizes[: 2 * mix] if mix else sizes)


def _packing(shards: TokenShards, data: Data) -> Packing:
    """Conversations are never split: a response without its prompt teaches little."""
    return "whole" if shards.has_answers else data.packing


def _cut(opened: list[TokenShards], sequence: int) -> Iterator[str]:
    for shards in opened:
        lengths = document_lengths(shards) if shards.has_answers else np.empty(0)
        if cut := int((lengths > sequence + 1).sum()):
            what = f"{cut:,} of {len(lengths):,} conversations in {shards.folder}"
            yield f"{what} are longer than {sequence:,} tokens and were cut; raise train.sequence"


def _repeated(parts: tuple[Batches, ...], counts: tuple[int, ...], job: TrainJob) -> Iterator[str]:
    """Up to four epochs are nearly as good as fresh text (Muennighoff et al. 2023, arXiv 2305.16264)."""
    for part, count in zip(parts, counts, strict=True):
        times = job.steps * count / sum(counts) / part.steps_per_epoch
        if times > _OFTEN:
            often = f"{part.shards.folder} is read {times:.1f} times in {job.steps} steps"
            yield f"{often}; beyond {_OFTEN} it teaches less"


def _check_tokenizers(opened: list[TokenShards]) -> None:
    first = opened[0]
    for other in opened[1:]:
        if other.index.tokenizer_sha256 != first.index.tokenizer_sha256:
            both = f"{other.folder} and {first.folder} were made with different tokenizers"
            raise BadData(f"{both}; prepare one again with --tokenizer {first.folder}/tokenizer")
