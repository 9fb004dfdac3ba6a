"""Token shards on disk: what is written is read back, and damage is named."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadData, NotFound
from armillary.training.data import shard_files as files
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.shard_files import check_sum
from armillary.training.data.shard_index import Index
from armillary.training.data.shards import TokenShards

DOCUMENTS = [[5, 6, 7, 0], [8, 0], list(range(20, 35)), [9, 9, 9, 0], [0]]
FILES = ["train/00000.bin", "train/00000.idx", "train/00001.bin", "train/00001.idx", "tokenizer/tokenizer.json"]
ROW = [token for ids in DOCUMENTS for token in ids]


def test_documents_come_back(make_shards) -> None:
    shards = make_shards(DOCUMENTS)
    assert (shards.num_documents, shards.num_tokens) == (5, len(ROW))
    assert [list(shards.document(number)) for number in range(5)] == DOCUMENTS
    with pytest.raises(IndexError):
        shards.document(5)


def test_a_document_never_spans_shards(make_shards) -> None:
    shards = make_shards(DOCUMENTS, shard_tokens=10)
    assert [(shard.file, shard.tokens, shard.documents) for shard in shards.index.splits["train"]] == [
        ("train/00000.bin", 21, 3),
        ("train/00001.bin", 5, 2),
    ]
    assert shards.index.splits["validation"] == ()


@pytest.mark.parametrize("limit", [1, 5, 10, 1000])
def test_stretches_cross_shards(make_shards, limit: int) -> None:
    shards = make_shards(DOCUMENTS, shard_tokens=limit)
    begins = np.cumsum([0, *map(len, DOCUMENTS)])[:-1]
    for start in range(len(ROW) + 2):
        for count in (0, 1, 7, 99):
            assert list(shards.read(start, count)) == ROW[start : start + count]
            expected = [begin for begin in begins if start <= begin < start + count]
            assert list(shards.document_starts(start, count)) == expected


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 65_535), ("uint32", 4_294_967_295)])
def test_large_ids(make_shards, dtype: str, largest: int) -> None:
    shards = make_shards([[largest, 0]], dtype=dtype)
    assert list(shards.read(0, 2)) == [largest, 0]
    shards.verify()


def test_an_empty_split(make_shards) -> None:
    folder = make_shards(DOCUMENTS).folder
    empty = TokenShards.open(folder, "validation")
    assert (empty.num_tokens, empty.num_documents) == (0, 0)
    assert list(empty.read(0, 5)) == []
    empty.verify()


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 10**6), name=st.sampled_from(FILES))
def test_one_changed_bit_anywhere_is_found_and_named(make_shards, place: int, name: str) -> None:
    folder = make_shards(DOCUMENTS).folder
    data = bytearray((folder / name).read_bytes())
    data[place % len(data)] ^= 1 << (place % 8)
    (folder / name).write_bytes(data)
    with pytest.raises(BadData, match=f"{name} is corrupt .*; prepare the data again"):
        TokenShards.open(folder).verify()


@pytest.mark.parametrize("name", ["train/00001.bin", "train/00000.idx"])
def test_missing_and_short_files_are_named_when_opened(make_shards, name: str) -> None:
    folder = make_shards(DOCUMENTS).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(BadData, match=rf"{name} has \d+ bytes instead of \d+; prepare the data again"):
        TokenShards.open(folder)
    (folder / name).unlink()
    with pytest.raises(BadData, match=f"{name} is missing; prepare the data again"):
        TokenShards.open(folder)


def test_a_missing_tokenizer_is_named(make_shards) -> None:
    shards = make_shards(DOCUMENTS)
    (shards.tokenizer_folder / "tokenizer.json").unlink()
    with pytest.raises(BadData, match=r"tokenizer.json is missing"):
        shards.verify()


def test_no_token_data(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no token data in .*; make it with: armillary data prepare SOURCE --out"):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "has token format 2, this program reads 1; prepare the data again"),
        ({"dtype": "float16"}, r"is damaged \(.*dtype=float16 is not known.*\); prepare the data again"),
        ({"splits": {"train": []}}, r"is damaged \(splits \['train'\]\)"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"vocab": "many"}, "vocab='many' is not a whole number"),
    ],
)
def test_a_damaged_index(make_shards, change: dict[str, object], why: str) -> None:
    path = make_shards(DOCUMENTS).folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadData, match=why):
        Index.read(path.parent)
    path.write_text("{")
    with pytest.raises(BadData, match=r"index.json is not readable JSON"):
        Index.read(path.parent)


def _rewrite(path: Path, array: np.ndarray) -> None:
    assert path.stat().st_size == array.nbytes
    path.write_bytes(array.tobytes())


@pytest.mark.parametrize("offsets", [[0, 9, 6, 21], [1, 4, 6, 21], [0, 4, 6, 20]])
def test_offsets_out_of_order_are_found_when_first_read(make_shards, offsets: list[int]) -> None:
    """Sizes are right, so only the content tells; a checksum is not needed for that."""
    folder = make_shards(DOCUMENTS).folder
    _rewrite(folder / "train/00000.idx", np.array(offsets, "<u8"))
    shards = TokenShards.open(folder)
    with pytest.raises(BadData, match=r"train/00000.idx is corrupt \(offsets out of order\); prepare the data again"):
        shards.document_starts(0, 30)


def test_ids_beyond_the_vocabulary_are_found_when_read(make_shards) -> None:
    folder = make_shards(DOCUMENTS).folder
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab": 34}))
    shards = TokenShards.open(folder)
    assert list(shards.read(0, 4)) == [5, 6, 7, 0]
    with pytest.raises(BadData, match=r"train/00000.bin holds ids beyond its vocabulary of 34, so it is corrupt"):
        shards.read(0, 30)


def test_checksums_are_compared_when_first_read_on_request(make_shards) -> None:
    folder = make_shards(DOCUMENTS).folder
    data = bytearray((folder / "train/00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "train/00001.bin").write_bytes(data)
    TokenShards.open(folder).read(0, 99)  # a flipped bit that is a plausible id passes otherwise
    shards = TokenShards.open(folder, verify=True)
    assert list(shards.read(0, 4)) == [5, 6, 7, 0]  # the shard before it is sound
    with pytest.raises(BadData, match=r"train/00001.bin is corrupt \(its checksum differs from the index\)"):
        shards.read(0, 99)


def test_a_shard_is_compared_once_until_it_changes(
    make_shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared = make_shards(DOCUMENTS).folder, []
    monkeypatch.setattr(files, "check_sum", lambda path, sha256: compared.append(path.name) or check_sum(path, sha256))

    def read() -> None:
        cache = Cache(folder=tmp_path, limit_bytes=10**6)
        TokenShards.open(folder, cache=cache, verify=True).read(0, 99)

    read()
    assert compared == ["00000.bin", "00001.bin"]
    read()
    assert len(compared) == 2, "what was found sound is remembered"
    path = folder / "train/00001.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    for _ in range(2):
        with pytest.raises(BadData, match=r"train/00001.bin is corrupt \(its checksum differs from the index\)"):
            read()
    assert len(compared) == 4, "what was not is compared each time"


def test_without_a_place_to_remember_every_opening_compares(
    make_shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared = make_shards(DOCUMENTS).folder, []
    monkeypatch.setattr(files, "check_sum", lambda path, sha256: compared.append(path.name) or check_sum(path, sha256))
    (tmp_path / "verified").write_text("a file where the folder should be")
    for _ in range(2):
        TokenShards.open(folder, cache=Cache(folder=tmp_path, limit_bytes=10**6), verify=True).read(0, 4)
    assert compared == ["00000.bin"] * 2


def test_a_pickle_opens_the_files_again_and_carries_no_ids(make_shards) -> None:
    shards = make_shards([list(range(1, 60_000))], shard_tokens=10**6)
    data = pickle.dumps(shards)
    assert len(data) < 2000
    assert list(pickle.loads(data).read(5, 3)) == [6, 7, 8]


def test_a_shard_cut_short_while_it_is_read_is_named(make_shards) -> None:
    """Reading a memory map beyond the end of its file would end the process by a signal."""
    shards = make_shards(DOCUMENTS)
    shards.read(0, 26)
    path = shards.folder / "train/00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:2])
    with pytest.raises(BadData, match=r"train/00001.bin has 2 bytes instead of 10; prepare the data again"):
        shards.read(0, 26)
    path.write_bytes(data)
    assert list(shards.read(0, 26)) == ROW
    path.unlink()  # still mapped
    assert list(shards.read(0, 26)) == ROW
