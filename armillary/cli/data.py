"""`armillary data prepare`: text, JSONL, Parquet or a folder as token shards with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli.output import Output, path_text
from armillary.cli.progress import Bar
from armillary.cli.verb import VerbGroup
from armillary.store.home import Home
from armillary.units import bytes_text, count_text, parse_count, seconds_text

if TYPE_CHECKING:
    from armillary.training.data.prepare import Prepared

data = VerbGroup("data", help="Prepare text as token shards.")


@data.verb
@click.argument("source", default="stdlib")
@click.option("--out", "target", type=click.Path(path_type=Path), help="Folder to write.  [default: data/NAME]")
@click.option("--vocab", default="8192", show_default=True, help="Size of the tokenizer trained on the text.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder with a tokenizer.json to use instead.")
@click.option("--key", default="text", show_default=True, help="Field of JSONL lines or column of Parquet files.")
@click.option("--held-out", default=0.01, show_default=True, help="Share of documents kept for validation.")
@click.option("--overwrite", is_flag=True, help="Replace a folder made from something else.")
def prepare(
    out: Output,
    home: Home,
    source: str,
    target: Path | None,
    vocab: str,
    tokenizer: Path | None,
    key: str,
    held_out: float,
    overwrite: bool,
) -> None:
    """Turn text into token shards with a tokenizer and a held-out split.

    SOURCE is a file (.txt .md .py … .jsonl .jsonl.gz .parquet), a folder, a glob, or stdlib: the sources of Python's
    standard library on this machine, which need no download.
    """
    from armillary.training.data.prepare import folder_name
    from armillary.training.data.prepare import prepare as library_prepare

    size = parse_count(vocab)
    folder = target or home.data / folder_name(source, vocab=size, tokenizer=tokenizer, key=key, held_out=held_out)
    with out.progress("preparing", unit="B") as bar:
        made = library_prepare(
            source,
            folder,
            vocab=size,
            tokenizer=tokenizer,
            key=key,
            held_out=held_out,
            overwrite=overwrite,
            progress=on_bar(bar),
        )
    say_prepared(out, made)
    out.result(summary(made), quiet=str(made.folder))


def on_bar(bar: Bar) -> Callable[[int, int, str], None]:
    """Progress of `prepare` on a bar, with the stage beside it."""

    def report(done: int, total: int, what: str) -> None:
        if total > 1:  # training the tokenizer counts no bytes
            bar.at(done, total)
        bar.update(0, stage=what)

    return report


def say_prepared(out: Output, made: Prepared) -> None:
    index = made.index
    took = "already there" if made.reused else f"in {seconds_text(made.seconds)}"
    amount = f"{count_text(made.num_tokens)} tokens of {count_text(made.num_documents)} documents"
    out.say(f"{path_text(made.folder)} · {amount} · {took}")
    per_token = f"{made.bytes_per_token:.2f} bytes a token"
    kept = f"{count_text(index.num_tokens('validation'))} tokens held out"
    out.say(f"  {bytes_text(index.text_bytes)} of text · vocabulary {index.vocab:,} · {per_token} · {kept}")
    for each in index.skipped[:3]:
        out.say(f"  skipped {each}")
    if index.num_skipped > 3:
        out.say(f"  and {index.num_skipped - 3} more")


def summary(made: Prepared) -> dict[str, object]:
    return {
        "folder": str(made.folder),
        "tokens": made.num_tokens,
        "documents": made.num_documents,
        "vocab": made.index.vocab,
        "bytes_per_token": made.bytes_per_token,
        "reused": made.reused,
        "seconds": made.seconds,
    }
