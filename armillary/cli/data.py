"""`armillary data`: text as token shards with a tokenizer (prepare), what is in them (inspect), and whether they are
intact (verify)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.output import Output, path_text
from armillary.cli.progress import Bar
from armillary.cli.verb_decorator import VerbGroup, moved
from armillary.errors import BadInput
from armillary.spec.tables.train import Data
from armillary.store.home import Home
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.shard_index import SPLITS, Index
from armillary.units import bytes_text, count_text, parse_count, seconds_text

if TYPE_CHECKING:
    from armillary.training.data.encode_parts import Mapped
    from armillary.training.data.shards import TokenShards
    from armillary.training.prepare_data import Prepared

data = VerbGroup("data", help="Prepare text as token shards, inspect them, verify them.")


@data.verb
@click.argument("source", default="stdlib")
@click.option("--out", "target", type=click.Path(path_type=Path), help="Folder to write.  [default: data/NAME]")
@click.option(
    "--tokenizer",
    default="8192",
    show_default=True,
    metavar="SIZE|FOLDER",
    help="Size of one trained on the text, or the folder of one to use.",
)
@click.option("--key", default="text", show_default=True, help="JSONL key, Parquet column or suffix in tars.")
@click.option("--held-out", default=0.01, show_default=True, help="Share of documents held out for validation.")
@click.option("--shuffle", is_flag=True, help="Shuffle the documents.")
@click.option("--chat", metavar="TEMPLATE", help="Chats, loss on responses only: own, chatml, plain or a .jinja.")
@click.option("--on", "where", metavar="ray[=HOST:PORT]", help="Read and encode on a Ray cluster: the same shards.")
@click.option("--overwrite", is_flag=True, help="Replace a folder made from something else.")
@moved("--vocab", "try --tokenizer 8192")
def prepare(
    out: Output,
    home: Home,
    source: str,
    target: Path | None,
    tokenizer: str,
    key: str,
    held_out: float,
    shuffle: bool,
    chat: str | None,
    where: str | None,
    overwrite: bool,
) -> None:
    """Turn text into token shards with a tokenizer and a held-out split.

    SOURCE is a file (.txt .md .py … .jsonl .parquet, .gz of these, WebDataset .tar), a folder, a glob, a numbered set
    like part-{000..099}.tar, any of these in a store (s3://… https://…), or stdlib: the sources of Python's standard
    library on this machine, which need no download.
    """
    from armillary.training.prepare_data import folder_name
    from armillary.training.prepare_data import prepare as library_prepare

    settings: dict[str, Any] = {
        **_tokenizer(tokenizer),
        "key": key,
        "held_out": held_out,
        "shuffle": shuffle,
        "format": "text" if chat is None else "chat",
        "template": "" if chat in (None, "own") else chat,
    }
    folder = target or home.data / folder_name(source, **settings)
    more: dict[str, Any] = {"overwrite": overwrite, "cache": _cache(home), "mapped": _map_on(where)}
    with out.progress("preparing", unit="B") as bar:
        prepared = library_prepare(source, folder, **settings, **more, progress=on_bar(bar))
    say_prepared(out, prepared)
    out.result(summary(prepared), quiet=str(prepared.folder))


def _tokenizer(text: str) -> dict[str, Any]:
    """The size of a tokenizer that is trained, or the folder of one that is used."""
    if text[:1].isdigit() and not Path(text).exists():
        return {"vocab": parse_count(text), "tokenizer": None}
    return {"tokenizer": Path(text).expanduser()}


def _map_on(where: str | None) -> Mapped | None:
    """What works on parts of the text; None: this process."""
    if where is None:
        return None
    name, _, address = where.partition("=")
    if name != "ray":
        raise BadInput(f"--on {where} is not known; use --on ray, or ray=HOST:PORT")
    from armillary.cluster.ray.ordered_map import RayMap

    return RayMap(address)


def on_bar(bar: Bar) -> Callable[[int, int, str], None]:
    """Progress of `prepare` on a bar, with the stage beside it."""

    def report(done: int, total: int, what: str) -> None:
        if total > 1:  # training the tokenizer counts no bytes
            bar.at(done, total)
        bar.update(0, stage=what)

    return report


def say_prepared(out: Output, prepared: Prepared) -> None:
    index = prepared.index
    if prepared.remade:
        out.warn(f"{prepared.remade}; the text was prepared again")
    took = "already there" if prepared.reused else f"in {seconds_text(prepared.seconds)}"
    amount = f"{count_text(prepared.num_tokens)} tokens of {count_text(prepared.num_documents)} documents"
    out.say(f"{path_text(prepared.folder)} · {amount} · {took}")
    per_token = f"{prepared.bytes_per_token:.2f} bytes per token"
    held_out = f"{count_text(index.num_tokens('validation'))} tokens held out"
    out.say(f"  {bytes_text(index.text_bytes)} of text · vocabulary {index.vocab:,} · {per_token} · {held_out}")
    for each in index.skipped[:3]:
        out.say(f"  skipped {each}")
    if index.num_skipped > 3:
        out.say(f"  and {index.num_skipped - 3} more")


def summary(prepared: Prepared) -> dict[str, object]:
    return {
        "folder": str(prepared.folder),
        "tokens": prepared.num_tokens,
        "documents": prepared.num_documents,
        "vocab": prepared.index.vocab,
        "bytes_per_token": prepared.bytes_per_token,
        "reused": prepared.reused,
        "seconds": prepared.seconds,
    }


@data.verb
@click.argument("folder")
@click.option("--sequence", default=1024, show_default=True, help="Length of a row, to compare ways of packing.")
@click.option("--show", default=0, help="Documents to print.")
def inspect(out: Output, home: Home, folder: str, sequence: int, show: int) -> None:
    """Show what is in a folder of token shards: sizes, document lengths, and what packing makes of them.

    FOLDER may be a URL.
    """
    from armillary.training.data.inspect_shards import about, fits
    from armillary.training.data.shards import TokenShards

    if sequence < 1:
        raise BadInput(f"a sequence of {sequence} holds nothing; use --sequence 1024")
    opened = [TokenShards.open(folder, split, cache=_cache(home)) for split in SPLITS]
    facts, packed = [about(shards) for shards in opened], fits(opened[0], sequence)
    out.table(
        folder,
        ["split", "tokens", "documents", "median length", "longest", "shards", "size"],
        [
            [a.split, a.tokens, a.documents, a.median_length, a.longest, a.shards, bytes_text(a.num_bytes)]
            for a in facts
        ],
    )
    out.table(
        f"rows of {sequence}",
        ["packing", "rows", "documents cut", "padding"],
        [[fit.packing, fit.rows, f"{fit.cut_fraction:.1%}", f"{fit.padding_fraction:.1%}"] for fit in packed],
    )
    index = opened[0].index
    _say_origin(out, index, facts[0].answers)
    _show_documents(out, opened[0], show)
    out.result({"splits": facts, "packing": packed, "vocab": index.vocab, "made_from": index.made_from}, quiet=folder)


def _say_origin(out: Output, index: Index, answers: int | None) -> None:
    """Vocabulary, what of it is learnt, and what it was made from."""
    origin = " · ".join(f"{name} {_shown(value)}" for name, value in index.made_from.items() if name != "files")
    learnt = f" · {answers:,} training tokens are answers, the rest is not learnt" if answers else ""
    out.say(f"vocabulary {index.vocab:,} ({index.dtype}){learnt}" + (f" · made from {origin}" if origin else ""))


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}…"


def _show_documents(out: Output, shards: TokenShards, count: int) -> None:
    from armillary.model.text.tokenizer import Tokenizer

    if count > 0:
        tokenizer = Tokenizer.load(shards.tokenizer_folder)
        for number in range(min(count, shards.num_documents)):
            out.say(f"--- document {number}")
            out.say(tokenizer.decode(shards.document(number).tolist()))


@data.verb
@click.argument("folder")
def verify(out: Output, home: Home, folder: str) -> None:
    """Read every shard of a folder and compare it with its checksum; the first bad file is named.

    FOLDER may be a URL: what is not in the cache yet is fetched.
    """
    from armillary.training.data.shards import TokenShards

    tokens = 0
    for split in SPLITS:
        shards = TokenShards.open(folder, split, cache=_cache(home))
        with out.progress(f"verifying {split}", total=shards.num_tokens, unit="token") as bar:
            shards.verify(bar.at)
        tokens += shards.num_tokens
    out.say(f"{folder} is whole: {count_text(tokens)} tokens as they were written")
    out.result({"folder": folder, "tokens": tokens, "whole": True}, quiet=folder)


def _cache(home: Home) -> Cache:
    """The cache of what verbs fetch: the folder and the size that training defaults to."""
    return Cache(folder=home.cache / "fetched", limit_bytes=Data.cache_bytes)
