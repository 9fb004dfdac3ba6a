"""The cache of stores: whole files only, fetched once by whoever comes first, never larger than it may be."""

import errno
import hashlib
import importlib.util
import multiprocessing
import os
import sys
import time
from pathlib import Path

import fsspec
import pytest

from armillary.errors import ArmillaryError, BadData, BadInput, MissingPart
from armillary.store.remote import Remote
from armillary.training.data.object_store_cache import Cache


@pytest.fixture
def store():
    """A folder in memory, with a few files of 100 bytes."""
    system = fsspec.filesystem("memory")
    for number in range(6):
        system.pipe(f"/store/{number}.bin", bytes([number]) * 100)
    yield Remote(url="memory://store")
    system.rm("/store", recursive=True)


def sha256(number: int) -> str:
    return hashlib.sha256(bytes([number]) * 100).hexdigest()


def cached(cache: Cache) -> list[str]:
    """Files that are there, without their tags."""
    return sorted(path.name.partition("-")[2] for path in cache.folder.iterdir() if path.name[0] != ".")


def test_a_file_is_fetched_once(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=1000)
    path = cache.get(store, "1.bin", size=100, sha256=sha256(1))
    assert path.read_bytes() == bytes([1]) * 100
    fsspec.filesystem("memory").pipe("/store/1.bin", b"changed")
    assert cache.get(store, "1.bin", size=100, sha256=sha256(1)) == path
    assert path.read_bytes() == bytes([1]) * 100


def test_without_a_checksum_a_changed_file_is_fetched_again(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=1000)
    first = cache.get(store, "1.bin")
    fsspec.filesystem("memory").pipe("/store/1.bin", b"changed")
    assert cache.get(store, "1.bin").read_bytes() == b"changed"
    assert first.read_bytes() == bytes([1]) * 100


def test_what_was_used_least_goes_first(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=300)
    for age, number in enumerate([0, 1, 2]):
        path = cache.get(store, f"{number}.bin", size=100)
        os.utime(path, (time.time() - 100 + age,) * 2)
    cache.get(store, "0.bin", size=100)  # used again
    with cache.get(store, "1.bin", size=100).open("rb") as reading:
        os.utime(reading.name, (1, 1))
        cache.get(store, "3.bin", size=100)
        assert cached(cache) == ["0.bin", "2.bin", "3.bin"]
        assert reading.read() == bytes([1]) * 100  # whoever has it open goes on
    cache.get(store, "4.bin", size=100)
    assert cached(cache) == ["0.bin", "3.bin", "4.bin"]


def test_a_file_larger_than_the_cache_is_refused(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=99)
    with pytest.raises(BadInput, match=r"memory://store/0.bin has 100 B, more .* try --set data.cache_bytes=200"):
        cache.get(store, "0.bin", size=100)
    assert cached(cache) == []


def test_damage_on_the_way_is_named_and_nothing_is_kept(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=1000)
    with pytest.raises(BadData, match=r"memory://store/1.bin is corrupt \(its checksum differs from the index\)"):
        cache.get(store, "1.bin", size=100, sha256=sha256(2))
    with pytest.raises(BadData, match=r"memory://store/1.bin has 100 bytes instead of 99; upload it again"):
        cache.get(store, "1.bin", size=99)
    with pytest.raises(BadData, match=r"memory://store/9.bin is missing; check the address"):
        cache.get(store, "9.bin", size=100, sha256=sha256(9))
    assert [path.name for path in cache.folder.iterdir() if not path.name.startswith(".lock-")] == []


def test_a_short_hiccup_is_tried_again(store: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(folder=tmp_path / "cache", limit_bytes=1000)
    failures = iter([OSError("connection reset"), OSError("connection reset"), None])
    system = fsspec.filesystem("memory")
    plain = system.open

    def shaky(*args, **kwargs):
        if (error := next(failures)) is not None:
            raise error
        return plain(*args, **kwargs)

    monkeypatch.setattr(system, "open", shaky)
    assert cache.get(store, "1.bin", size=100, sha256=sha256(1)).stat().st_size == 100
    failures = iter([OSError("no route to host")] * 3)
    with pytest.raises(ArmillaryError, match=r"cannot read memory://store/2.bin \(OSError: no route to host\); check"):
        cache.get(store, "2.bin", size=100)


def test_a_full_disk_is_not_taken_for_a_bad_store(store: Remote, tmp_path: Path, monkeypatch) -> None:
    def full_disk(remote: Remote, name: str, *_: object) -> None:
        for _ in remote.read(name):
            raise OSError(errno.ENOSPC, "No space left on device")  # as a write of the first piece would

    monkeypatch.setattr("armillary.training.data.object_store_cache._copy", full_disk)
    cache = Cache(folder=tmp_path, limit_bytes=1000)
    with pytest.raises(ArmillaryError, match=r"disk full while writing .*-1.bin; free some space"):
        cache.get(store, "1.bin", size=100, sha256=sha256(1))
    assert cached(cache) == []


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(MissingPart, match=r"reading s3://bucket needs another package \(Install s3fs"):
            Remote(url="s3://bucket").exists("x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPart, match=r"reading s3://bucket needs fsspec: pip install 'armillary\[data\]'"):
        Remote(url="s3://bucket").exists("x")


def test_what_a_killed_process_left_goes_when_room_is_needed(store: Remote, tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path, limit_bytes=250)
    left = tmp_path / ".0123456789abcdef-9.bin.partial"
    left.write_bytes(b"x" * 100)
    cache.get(store, "0.bin", size=100)
    os.utime(left, (1, 1))
    cache.get(store, "1.bin", size=100)
    assert not left.exists()
    assert cached(cache) == ["0.bin", "1.bin"]


def _fetch_all(folder: str, url: str, barrier, found) -> None:
    cache = Cache(folder=Path(folder), limit_bytes=350)
    barrier.wait(30)
    bad = 0
    for turn in range(30):
        number = turn * 7 % 6
        try:
            content = cache.get(Remote(url=url), f"{number}.bin", size=100, sha256=sha256(number)).read_bytes()
        except FileNotFoundError:
            continue  # given up between the two: who maps shards tries again
        bad += content != bytes([number]) * 100
    found.put(bad)


def test_two_processes_share_a_cache_that_is_too_small_for_all(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.bin").write_bytes(bytes([number]) * 100)
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(2), context.Queue()
    args = (str(tmp_path / "cache"), source.as_uri(), barrier, found)
    processes = [context.Process(target=_fetch_all, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60), found.get(timeout=60)] == [0, 0]
    for process in processes:
        process.join(30)
    sizes = [path.stat().st_size for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".lock-")]
    assert sum(sizes) <= 350
    assert set(sizes) == {100}
