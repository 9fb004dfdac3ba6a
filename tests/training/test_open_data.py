"""From a [data] table to batches: text, prepared folders, stores and blends of them."""

import functools
import http.server
import io
import json
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from armillary.errors import ArmillaryError, BadData, BadInput, NotFound
from armillary.spec.tables.train import Data, TrainJob
from armillary.store.home import Home
from armillary.training.data.batch_sources import Blend
from armillary.training.data.corpus import find_corpus
from armillary.training.data.loader import Loader
from armillary.training.data.object_store_cache import Cache
from armillary.training.open_data import OpenData, open_data, plan_data, prepare_data
from armillary.training.prepare_data import prepare

JOB = TrainJob(sequence=16, batch_tokens=16 * 8, steps=10)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, words in {"a": "alpha one two", "b": "beta three four five six"}.items():
        lines = [json.dumps({"text": f"{words} {number} " * (number % 5 + 1)}) for number in range(1200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def prepared(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source a as ten or so small shards."""
    folder = tmp_path_factory.mktemp("prepared") / "a"
    prepare(texts / "a.jsonl", folder, vocab=300, held_out=0.1, shard_tokens=3000)
    return folder


def opened(data: Data, home: Path, job: TrainJob = JOB) -> OpenData:
    planned = plan_data(data, Home.at(home), vocab=300, tokenizer=None)
    prepare_data(data, planned)
    return open_data(planned, job)


def same(one: OpenData, other: OpenData, steps: range = range(0, 40, 7)) -> bool:
    return all(np.array_equal(one.train.at(step).tokens_BT, other.train.at(step).tokens_BT) for step in steps)


def test_text_is_prepared_once(texts: Path, tmp_path: Path) -> None:
    data = Data(source=str(texts / "a.jsonl"), held_out=0.1)
    planned = plan_data(data, Home.at(tmp_path), vocab=300, tokenizer=None)
    (first,) = prepare_data(data, planned)
    (second,) = prepare_data(data, planned)
    assert (first.reused, second.reused) == (False, True)
    found = open_data(planned, JOB)
    assert found.vocab == first.index.vocab
    assert found.tokenizer_folder == first.folder / "tokenizer"
    assert found.train.at(3).tokens_BT.shape == (8, 16)
    learnt = sum(batch.num_targets for batch in found.validation.batches(rows=4))
    held_out = first.index.num_tokens("validation") - first.index.num_documents("validation")
    assert learnt == held_out


def test_a_missing_source_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file or folder '.*nothing'"):
        plan_data(Data(source=str(tmp_path / "nothing")), Home.at(tmp_path / "home"), vocab=300, tokenizer=None)
    assert not (tmp_path / "home").exists()


def test_one_flipped_bit_is_refused_unless_that_is_switched_off(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    path = folder / "train/00000.bin"
    ids = bytearray(path.read_bytes())
    ids[0] ^= 1
    path.write_bytes(ids)
    with pytest.raises(BadData, match=r"train/00000.bin is corrupt \(its checksum differs from the index\)"):
        for step in range(20):
            opened(Data(path=str(folder)), tmp_path).train.at(step)
    for step in range(20):
        opened(Data(path=str(folder), verify=False), tmp_path).train.at(step)


def test_shards_are_read_as_they_are_from_a_folder_and_from_stores(prepared: Path, tmp_path: Path) -> None:
    plain = opened(Data(source=str(prepared)), tmp_path)
    assert same(plain, opened(Data(path=str(prepared)), tmp_path))
    assert same(plain, opened(Data(source=prepared.as_uri(), verify=True), tmp_path / "file"))
    with _in_memory(prepared) as url:
        far = opened(Data(source=url), tmp_path / "memory")
        assert same(plain, far)
        assert far.vocab == plain.vocab
        one, other = ((place.tokenizer_folder / "tokenizer.json").read_bytes() for place in (plain, far))
        assert one == other
        assert sum(b.num_targets for b in far.validation.batches(rows=4)) == sum(
            b.num_targets for b in plain.validation.batches(rows=4)
        )
        system = fsspec.filesystem("memory")
        system.pipe("/copy/train/00001.idx", b"short")
        with pytest.raises(BadData, match=r"memory://copy/train/00001.idx has 5 bytes instead of \d+; upload it again"):
            opened(Data(source=url), tmp_path / "memory")
        system.rm("/copy/train/00001.idx")
        with pytest.raises(BadData, match=r"memory://copy/train/00001.idx is missing; check the address"):
            opened(Data(source=url), tmp_path / "memory")


class _in_memory:
    """A copy of a folder in fsspec's memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        self.system = fsspec.filesystem("memory")
        self.system.put(f"{self._folder}/", "/copy/", recursive=True)
        return "memory://copy"

    def __exit__(self, *_: object) -> None:
        self.system.rm("/copy", recursive=True)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and counts what is asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(prepared: Path, tmp_path: Path):
    """The prepared folder on a web server of this machine: its address, the list of requests, and its files."""
    folder = tmp_path / "www"
    shutil.copytree(prepared, folder / "data")
    handler = type("Handler", (Quiet,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/data", handler.asked, folder / "data"
    server.shutdown()
    thread.join()
    server.server_close()


def test_shards_on_a_web_server_with_workers(served, prepared: Path, tmp_path: Path) -> None:
    url, asked, folder = served
    data = Data(source=url)
    planned = plan_data(data, Home.at(tmp_path), vocab=300, tokenizer=None)
    near, far = open_data(Data(path=str(prepared)), JOB).train, open_data(planned, JOB)
    with Loader(far.train, device=torch.device("cpu"), rank=0, world=1, workers=2, start=0, stop=30) as loader:
        for step in range(30):
            assert np.array_equal(loader.at(step).tokens_BT.numpy(), near.at(step).tokens_BT)
    shards = [path for path in asked if path.endswith(".bin")]
    assert shards and len(shards) == len(set(shards))  # two processes, one fetch each
    assert far.tokenizer_folder.is_dir()
    first = folder / "train/00000.bin"
    first.write_bytes(bytes(len(first.read_bytes())))
    fresh = replace(planned, cache=str(tmp_path / "fresh"))
    with pytest.raises(BadData, match=r"http://127.*/data/train/00000.bin is corrupt .*; upload it again"):
        _read_all(open_data(fresh, JOB))
    first.write_bytes(b"short")
    with pytest.raises(BadData, match=r"http://127.*/data/train/00000.bin has 5 bytes instead of \d+; upload it again"):
        open_data(fresh, JOB)
    first.unlink()
    with pytest.raises(BadData, match=r"http://127.*/data/train/00000.bin is missing; check the address"):
        open_data(fresh, JOB)


def test_tars_on_a_web_server(served, tmp_path: Path) -> None:
    url, _, folder = served
    for number in (8, 9, 10):
        with tarfile.open(folder / f"part-{number:03d}.tar", "w") as tar:
            about = tarfile.TarInfo(f"{number}.txt")
            about.size = 6
            tar.addfile(about, io.BytesIO(f"text{number:2d}".encode()))
    corpus = find_corpus(f"{url}/part-{{008..010}}.tar", cache=Cache(folder=tmp_path / "cache", limit_bytes=10**6))
    assert [item.text for item in corpus.documents()] == ["text 8", "text 9", "text10"]
    assert corpus.num_bytes == 3 * 10240
    assert corpus.fingerprint() == corpus.fingerprint()


def _read_all(found: OpenData) -> None:
    for step in range(int(found.train.steps_per_epoch) + 1):
        found.train.at(step)


def test_a_web_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArmillaryError, match=r"cannot read http://127.0.0.1:9/x/.* \(.*\); check the address"):
        open_data(Data(path="http://127.0.0.1:9/x", cache=str(tmp_path)), JOB)


def test_text_in_a_store_is_fetched_and_prepared(texts: Path, tmp_path: Path) -> None:
    near = opened(Data(source=str(texts)), tmp_path / "near")
    for source in (f"{texts.as_uri()}/*.jsonl", texts.as_uri(), f"{texts.as_uri()}/"):
        assert same(near, opened(Data(source=source), tmp_path / "far"))
    with pytest.raises(BadData, match=r"nothing to read in file://.* \(no files\)"):
        opened(Data(source=f"{texts.as_uri()}/*.tar"), tmp_path / "far")


def test_a_store_larger_than_the_cache_is_read_in_groups(prepared: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (prepared / "train").iterdir())
    data = Data(source=prepared.as_uri(), cache=str(tmp_path / "cache"), cache_bytes=size * 3 // 4)
    with pytest.raises(BadInput, match=r"do not fit into the cache of .*; try --set data.mix_shards=\d+, or a larger"):
        opened(data, tmp_path)
    grouped = opened(replace(data, mix_shards=2), tmp_path)
    near = opened(Data(source=str(prepared), mix_shards=2), tmp_path)
    assert same(near, grouped, range(int(near.train.steps_per_epoch) + 2))
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.is_file())
    assert 0 < kept <= data.cache_bytes


def test_a_blend_shares_one_tokenizer_and_keeps_proportions(texts: Path, tmp_path: Path) -> None:
    data = Data(blend={str(texts / "b.jsonl"): 1, str(texts / "a.jsonl"): 3}, held_out=0.1, packing="whole")
    found = opened(data, tmp_path)
    assert isinstance(found.train, Blend)
    assert found.train.order.counts == (3, 1)
    again = opened(replace(data, blend=dict(reversed(data.blend.items()))), tmp_path)
    assert same(found, again)  # the order in the recipe means nothing
    held_out = list(found.validation.batches(rows=8))
    assert {batch.tokens_BT.shape for batch in held_out} == {(8, 16)}
    halves = [list(found.validation.batches(rows=8, rank=rank, world=2)) for rank in (0, 1)]
    for whole, *parts in zip(held_out, *halves, strict=True):
        np.testing.assert_array_equal(np.concatenate([part.targets_BT for part in parts]), whole.targets_BT)
    expected = 0
    for folder in plan_data(data, Home.at(tmp_path), vocab=300, tokenizer=None).paths:
        about = json.loads((Path(folder) / "index.json").read_text())["splits"]["validation"]
        expected += sum(shard["tokens"] - shard["documents"] for shard in about)
    assert sum(batch.num_targets for batch in held_out) == expected


def test_a_blend_with_a_prepared_folder_takes_its_tokenizer(prepared: Path, texts: Path, tmp_path: Path) -> None:
    found = opened(Data(blend={str(prepared): 1, str(texts / "b.jsonl"): 1}), tmp_path)
    one, other = (folder / "tokenizer.json" for folder in (found.tokenizer_folder, prepared / "tokenizer"))
    assert one.read_bytes() == other.read_bytes()
    prepare(texts / "b.jsonl", tmp_path / "own", vocab=290)
    with pytest.raises(BadData, match=r"were made with different tokenizers; prepare one again with --tokenizer"):
        opened(Data(blend={str(prepared): 1, str(tmp_path / "own"): 1}), tmp_path)


def test_a_cache_too_small_for_any_group_says_how_large_it_must_be(prepared: Path, tmp_path: Path) -> None:
    data = Data(source=prepared.as_uri(), cache_bytes=100, mix_shards=1)
    with pytest.raises(BadInput, match=r"do not fit into the cache of 100 B; try --set data.cache_bytes=\d+"):
        opened(data, tmp_path)
    with pytest.raises(NotFound, match=r"no token data in file://.*; upload a folder that armillary data prepare"):
        opened(Data(source="stdlib", path=tmp_path.as_uri()), tmp_path)


def test_what_a_person_should_know(prepared: Path, tmp_path: Path) -> None:
    assert opened(Data(source=str(prepared)), tmp_path).notes == ()
    (note,) = opened(Data(source=str(prepared)), tmp_path, replace(JOB, steps=100_000)).notes
    assert "is read" in note and "times in 100000 steps; beyond 4 it teaches less" in note


def test_nothing_held_out_validates_nothing(texts: Path, tmp_path: Path) -> None:
    found = opened(Data(source=str(texts / "a.jsonl"), held_out=0), tmp_path)
    assert list(found.validation.batches(rows=8)) == []
