"""Files of conversations become shards with a mask of the answers, a held-out split and the tokenizer's template."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.errors import BadData, BadInput, NotFound
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.chat_data.prepare import make_chat, with_template
from armillary.training.data.corpus import find_corpus
from armillary.training.data.shard_index import Index
from armillary.training.data.shards import TokenShards

SETTINGS = {"held_out": 0.1, "seed": 0, "shard_tokens": 500, "format": "chat"}


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total


def record(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"double {i}"}, {"role": "assistant", "content": f"{2 * i}!"}]}


def make(source: Path, folder: Path, *, given: Tokenizer | None = None, template: str = "", **settings: Any) -> Index:
    folder.mkdir()
    return make_chat(find_corpus(source), folder, given, 300, SETTINGS | settings, quiet, template=template)


def said(folder: Path, split: str) -> list[tuple[str, str]]:
    """(everything, what is learnt) of every sample."""
    shards = TokenShards.open(folder, split)  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(folder / "tokenizer")
    found, start = [], 0
    for i in range(shards.num_documents):
        ids = shards.document(i)
        answers = shards.read_answers(start, len(ids))
        start += len(ids)
        found.append(tuple(tokenizer.decode(each.tolist(), skip_special=False) for each in (ids, ids[answers])))
    return found  # type: ignore[return-value]


def test_lines_become_shards(tmp_path: Path) -> None:
    lines = [json.dumps(record(i)) for i in range(50)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n\n")
    index = make(tmp_path / "talk.jsonl", tmp_path / "out")
    assert index.num_documents("train") == 45 and index.num_documents("validation") == 5
    found = said(tmp_path / "out", "train") + said(tmp_path / "out", "validation")
    assert sorted(found) == sorted(
        (
            f"<|endoftext|><|im_start|>user\ndouble {i}<|im_end|>\n<|im_start|>assistant\n{2 * i}!<|im_end|>",
            f"{2 * i}!<|im_end|>",
        )
        for i in range(50)
    )
    shards = TokenShards.open(tmp_path / "out")
    assert shards.has_answers and shards.num_shards > 1
    shards.verify()
    assert index.made_from["format"] == "chat"


def test_parquet_rows_and_packed_lines(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    source = tmp_path / "talks"
    source.mkdir()
    (source / "README.md").write_text("not a record")
    rows = [record(i) | {"tools": None} for i in range(30)]
    rows[3]["messages"][1]["name"] = "bot"  # a key that others lack: Arrow fills it with null
    parquet.write_table(arrow.Table.from_pylist(rows), source / "a.parquet")
    with gzip.open(source / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"prompt": f"halve {2 * i}", "response": str(i)}) + "\n" for i in range(30))
    index = make(source, tmp_path / "out", held_out=0.0)
    assert index.num_documents("train") == 60 and index.num_documents("validation") == 0
    assert ("58!<|im_end|>" in {answer for _, answer in said(tmp_path / "out", "train")}) and index.num_skipped == 0


def test_copies_never_cross_the_split(tmp_path: Path) -> None:
    lines = [json.dumps(record(i % 10) | {"id": i}) for i in range(100)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    make(tmp_path / "talk.jsonl", tmp_path / "out", held_out=0.3)
    train, held = (set(said(tmp_path / "out", split)) for split in ("train", "validation"))
    assert len(held) == 3 and len(train) == 7 and not train & held


def test_what_teaches_nothing_is_counted(tmp_path: Path) -> None:
    talk = record(1), {"messages": [{"role": "user", "content": "anyone there?"}]}
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)))
    index = make(tmp_path / "talk.jsonl", tmp_path / "out", held_out=0.0)
    assert index.num_skipped == 1 and "talk.jsonl:2: no answer to learn" in index.skipped[0]
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk[1]))
    with pytest.raises(BadData, match="has no answer to learn; give records"):
        make(tmp_path / "talk.jsonl", tmp_path / "none")


def test_a_template_is_given_kept_and_saved(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(json.dumps(record(4)))
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}")
    given = train_tokenizer(["double"], 280)
    make(tmp_path / "talk.jsonl", tmp_path / "out", given=given, template=str(tmp_path / "mine.jinja"))
    assert said(tmp_path / "out", "train") == [("<user>double 4<|im_end|><assistant>8!<|im_end|>", "8!<|im_end|>")]
    kept = Tokenizer.load(tmp_path / "out/tokenizer")
    assert kept.chat([{"role": "user", "content": "x"}]) == "<user>x<|im_end|>"
    make(tmp_path / "talk.jsonl", tmp_path / "plain", given=given, template="plain")
    whole = "<|endoftext|>User: double 4\n\nAssistant: 8!<|endoftext|>"
    assert said(tmp_path / "plain", "train") == [(whole, " 8!<|endoftext|>")]


def test_errors_end_with_the_next_step(tmp_path: Path) -> None:
    bare = Tokenizer(backend=train_tokenizer(["x"], 280).backend, special_tokens={}, eos_ids=(0,))
    with pytest.raises(BadInput, match=r"has no chat template; try --set data.template=plain"):
        with_template(bare, "")
    with pytest.raises(NotFound, match="no chat template 'chatlm'; name a readable file, or chatml or plain"):
        with_template(bare, "chatlm")
    (tmp_path / "talk.txt").write_text("hello")
    with pytest.raises(BadData, match="holds no records of conversations"):
        make(tmp_path / "talk.txt", tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"messages": [}\n')
    with pytest.raises(BadData, match=r"bad.jsonl:1 is not JSON"):
        make(tmp_path / "bad.jsonl", tmp_path / "out2")


def test_ids_beyond_16_bits_fit(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(json.dumps(record(4)))
    given = train_tokenizer(["double"], 280)
    given.backend.add_tokens([f"<{i}>" for i in range(2**16)])
    index = make(tmp_path / "talk.jsonl", tmp_path / "out", given=given)
    assert index.dtype == "uint32"
    assert np.asarray(TokenShards.open(tmp_path / "out").document(0)).dtype == np.dtype("<u4")
