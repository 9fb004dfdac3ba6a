"""Datasets of the Hub: their names, the Arrow files that `datasets` keeps, and one-line errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from armillary.errors import ArmillaryError, BadInput, MissingPart, NotFound
from armillary.training.data.corpus import find_corpus
from armillary.training.data.hub_datasets import hub_name
from armillary.training.data.readers import Document

ROWS = {"text": ["one text", "", None, "größer 漢字"], "label": [1, 2, 3, 4]}


def arrow_file(path: Path, *, indexed: bool = False) -> Path:
    rows = arrow.table(ROWS)
    make = arrow.ipc.new_file if indexed else arrow.ipc.new_stream
    with arrow.OSFile(str(path), "wb") as file, make(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=3)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for the package: what it was asked for; its one dataset is in a file."""
    asked: list[tuple[Any, ...]] = []
    path = arrow_file(tmp_path / "wikitext-train.arrow")

    def load_dataset(name: str, config: str | None, *, split: str) -> SimpleNamespace:
        asked.append((name, config, split))
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such'\ndoesn't exist on the Hub")
        return SimpleNamespace(cache_files=[{"filename": str(path)}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def texts(source: str, key: str = "text") -> list[str]:
    return [each.text for each in find_corpus(source, key=key).documents() if isinstance(each, Document)]


def test_a_split_is_read_through_the_package(hub: list[tuple[Any, ...]]) -> None:
    assert texts("hub:Salesforce/wikitext/wikitext-2-v1:test") == ["one text", "größer 漢字"]
    assert hub == [("Salesforce/wikitext", "wikitext-2-v1", "test")]
    with pytest.raises(NotFound, match=r"hub:no/such cannot be loaded \(Dataset 'no/such' doesn't exist"):
        texts("hub:no/such")
    with pytest.raises(ArmillaryError, match=r"has no column 'body' .*--key"):
        texts("hub:imdb", key="body")


def test_names_of_sources() -> None:
    assert hub_name("hub:imdb") == ("imdb", None, "train")
    with pytest.raises(BadInput, match=r"'train\[:1%\]' is no whole split"):
        hub_name("hub:a/b:train[:1%]")
    for bad in ("hub:", "hub:a/b/c/d", "hub:/b"):
        with pytest.raises(BadInput, match="names no dataset"):
            hub_name(bad)


@pytest.mark.parametrize("indexed", [False, True])
def test_arrow_files_of_both_kinds(tmp_path: Path, indexed: bool) -> None:
    assert texts(str(arrow_file(tmp_path / "a.arrow", indexed=indexed))) == ["one text", "größer 漢字"]


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPart, match=r"pip install 'armillary\[hub\]'"):
        texts("hub:imdb")


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"nothing of the kind")
    with pytest.raises(ArmillaryError, match="is no Arrow file"):
        texts(str(tmp_path / "a.arrow"))


@pytest.mark.peers
def test_the_real_package_on_a_folder_of_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a local folder for a dataset's name, and makes the Arrow files that it makes of the Hub's."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner/small/data").mkdir(parents=True)
    for split in ("train", "test"):
        rows = {"text": [f"{split} {i} größer 漢字" for i in range(5)], "label": list(range(5))}
        parquet.write_table(arrow.table(rows), tmp_path / f"owner/small/data/{split}-00000-of-00001.parquet")
    assert texts("hub:owner/small") == [f"train {i} größer 漢字" for i in range(5)]
    assert texts("hub:owner/small:test")[0] == "test 0 größer 漢字"
