"""`prepare`: writes a source of text as a folder of token shards with its tokenizer, completely or not at all.

Two passes stream the text: one surveys it (sizes, held-out documents, a sample for the tokenizer), one encodes it.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, BadModel, one_line
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import LARGEST, SMALLEST
from armillary.store.atomic import Taken, staged_folder
from armillary.store.remote import is_url
from armillary.training.chat_data.prepare import make_chat
from armillary.training.data.corpus import find_corpus
from armillary.training.data.corpus_survey import Progress
from armillary.training.data.encode_parts import Mapped
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.shard_index import NAME, SPLITS, Index
from armillary.training.data.shards import SHARD_TOKENS, TokenShards
from armillary.training.data.tokenize_corpus import encode_corpus


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made, or found made already (`reused`, from the same source and settings); `remade` is what was
    wrong with an existing folder that was rebuilt. `seconds` is the time this call took."""

    folder: Path
    index: Index
    reused: bool
    seconds: float
    remade: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.index.num_tokens(split) for split in SPLITS)

    @property
    def num_documents(self) -> int:
        return sum(self.index.num_documents(split) for split in SPLITS)

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for: higher is a better fit of the tokenizer."""
        return self.index.text_bytes / max(1, self.num_tokens)


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    vocab: int = 8192,
    tokenizer: str | Path | None = None,
    key: str = "text",
    held_out: float = 0.01,
    seed: int = 0,
    shuffle: bool = False,
    format: str = "text",
    template: str = "",
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    cache: Cache | None = None,
    progress: Progress = lambda done, total, what: None,
    mapped: Mapped | None = None,
) -> Prepared:
    """Turn `source` into token shards in `out`, with a BPE of `vocab` ids trained on it or the given tokenizer folder.

    `shuffle` mixes the documents; `format="chat"` reads conversations and marks their answers. Sources in a store are
    fetched into `cache`; `mapped` works on parts of them elsewhere, with the same result. A finished folder from the
    same source and settings is reused; another one is replaced only on `overwrite`.
    """
    begin = time.monotonic()
    _check(vocab, held_out, seed)
    corpus, out = find_corpus(source, key=key, cache=cache), Path(out)
    given = Tokenizer.load(tokenizer) if tokenizer is not None else None
    if given is not None and given.eos_id is None:
        raise BadModel(f"the tokenizer in {tokenizer} has no eos_token; name one in its tokenizer_config.json")
    wanted = {
        "source": corpus.source,
        "files": corpus.fingerprint(),
        "tokenizer": given.fingerprint if given else vocab,
        "held_out": held_out,
        "seed": seed,
        "shard_tokens": shard_tokens,
    }
    wanted |= _unusual(shuffle, format, template)
    if format == "chat" and mapped is not None:
        raise BadInput("chats are prepared on one machine; leave --on out")
    make = partial(make_chat, template=template) if format == "chat" else partial(encode_corpus, mapped=mapped)
    index, wrong = _finished(out, wanted, overwrite=overwrite)
    reused = index is not None
    if index is None:
        try:
            with staged_folder(out, overwrite=overwrite) as folder:
                index = make(corpus, folder, given, vocab, wanted, progress)
        except Taken:  # another process was quicker; what it made may be just what was asked for
            index, _ = _finished(out, wanted, overwrite=False)
            assert index is not None
            reused = True
    return Prepared(folder=out, index=index, reused=reused, seconds=time.monotonic() - begin, remade=wrong)


def folder_name(
    source: str | Path,
    *,
    vocab: int = 8192,
    tokenizer: str | Path | None = None,
    key: str = "text",
    held_out: float = 0.01,
    seed: int = 0,
    shuffle: bool = False,
    format: str = "text",
    template: str = "",
) -> str:
    """A name for the shards of a source: readable, and different where the settings are."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).name).strip("-.") or "text"
    name = f"{stem}-{Path(tokenizer).name if tokenizer else vocab}"
    unusual = _unusual(shuffle, format, template)
    if (str(source), tokenizer, key, held_out, seed, unusual) == ("stdlib", None, "text", 0.01, 0, {}):
        return name
    where = str(source) if str(source) == "stdlib" or is_url(str(source)) else str(Path(source).absolute())
    settings = [where, str(Path(tokenizer).absolute()) if tokenizer else vocab, key, held_out, seed, unusual]
    return f"{name}-{blake2b(repr(settings).encode(), digest_size=3).hexdigest()}"


def _unusual(shuffle: bool, format: str, template: str) -> dict[str, Any]:
    """Settings that are not the default: left out otherwise, so that folders made before they existed stay valid."""
    wording = Path(template).read_text(encoding="utf-8") if template and Path(template).is_file() else template
    given = {"shuffle": shuffle, "format": "" if format == "text" else format, "template": wording}
    return {name: value for name, value in given.items() if value}


def _check(vocab: int, held_out: float, seed: int) -> None:
    if vocab < SMALLEST:
        raise BadInput(f"a vocabulary of {vocab} is below the {SMALLEST} of byte-level BPE; try --tokenizer 8192")
    if vocab > LARGEST:
        raise BadInput(f"a vocabulary of {vocab:,} is more than the {LARGEST:,} we train; try --tokenizer 131072")
    if not 0 <= held_out <= 0.5:
        raise BadInput(f"held_out={held_out} is not a fraction between 0 and 0.5; 0.01 holds out one document in 100")
    if not 0 <= seed < 2**63:
        raise BadInput(f"seed={seed} is not between 0 and 2^63; use a small whole number")


# --- a folder that is there already


def _finished(out: Path, wanted: Mapping[str, Any], *, overwrite: bool) -> tuple[Index | None, str]:
    """The index of a usable folder made from `wanted`; None where the folder is to be made, with what is wrong with the
    one that is there."""
    if not out.exists():
        return None, ""
    if not (out / NAME).is_file():
        if out.is_dir() and not any(out.iterdir()):
            raise BadInput(f"{out} is an empty folder; remove it or choose another name")
        raise BadInput(f"{out} is there and holds no token data, so it is never overwritten; choose another name")
    try:
        for split in SPLITS:
            index = TokenShards.open(out, split).index
    except ArmillaryError as error:
        if overwrite:
            return None, str(error).split("; ")[0]
        raise
    differing = [name for name in {**index.made_from, **wanted} if index.made_from.get(name) != wanted.get(name)]
    if not differing:
        return index, ""
    wrong = f"{out} was made with {_difference(index, wanted, differing[0])}"
    if not overwrite:
        raise BadInput(f"{wrong}; add --overwrite to replace it")
    return None, wrong


def _difference(index: Index, wanted: Mapping[str, Any], name: str) -> str:
    if name == "files":
        return f"an earlier state of {wanted['source']}"
    return f"another {name} ({_short(index.made_from.get(name))}, now {_short(wanted.get(name))})"


def _short(value: Any) -> str:
    text = one_line(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
