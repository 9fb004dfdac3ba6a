"""Who writes what: every number once, shared evenly; and the files are those that torch itself reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from armillary.parallel.consensus import Consensus
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import save_plan
from armillary.training.checkpoint.checkpoint import load, save
from armillary.training.checkpoint.save_plan import WriteChunk, balance, split
from tests.ranks import Ranks

ALONE = Consensus(rank=0, size=1)
MB = 1 << 20


def chunk(name: str, *sizes: int, first: int = 0, full: int | None = None) -> WriteChunk:
    offsets = (first, *(0 for _ in sizes[1:]))
    return WriteChunk(name, offsets, sizes, (full or sizes[0], *sizes[1:]), torch.float32)


def test_replicas_write_equal_parts() -> None:
    has = [chunk("wide", 4 * MB, 2), *(chunk(f"norm.{number}", 1024) for number in range(40))]
    written = balance([has] * 4)
    loads = [sum(part.bytes for part in parts) for parts in written]
    assert sum(loads) == sum(part.bytes for part in has) and max(loads) - min(loads) <= 4096
    rows = sorted((part.offsets[0], part.sizes[0]) for parts in written for part in parts if part.name == "wide")
    assert rows == [(MB * number, MB) for number in range(4)]


def test_shards_stay_with_their_ranks_and_replicas_fill_up() -> None:
    shards = [chunk("a", MB, first=rank * MB, full=4 * MB) for rank in range(3)]
    written = balance([[shards[0], chunk("b", 2 * MB)], [shards[1], chunk("b", 2 * MB)], [shards[2]]])
    assert [[part for part in parts if part.name == "a"] for parts in written] == [[shard] for shard in shards]
    assert [sum(part.bytes for part in parts if part.name == "b") for parts in written] == [4 * MB, 4 * MB, 0]


@settings(deadline=None)
@given(length=st.integers(1, 50), width=st.integers(1, 20_000), ranks=st.integers(1, 9))
def test_a_split_has_every_row_once(length: int, width: int, ranks: int) -> None:
    parts = split(chunk("a", length, width), ranks)
    assert [row for part in parts for row in range(part.offsets[0], part.offsets[0] + part.sizes[0])] == list(
        range(length)
    )
    assert len(parts) <= max(1, ranks)


def test_large_tensors_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "LARGEST", MB)
    assert [part.bytes for part in split(chunk("a", 5, MB // 8), 1)] == [MB // 2] + [MB] * 2
    assert split(chunk("a", 1, 5 * MB), 3) == [chunk("a", 1, 5 * MB)], "one row cannot be split"


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "model.w": torch.randn(33, 17),
        "model.half": torch.randn(40_000).bfloat16(),
        "model.turned": torch.randn(8, 6).t(),
        "optimizer.step": torch.tensor(7.0),
        "optimizer.count": torch.arange(5),
    }


def test_plain_torch_reads_the_files(tmp_path: Path) -> None:
    """The slow twin: torch writes and reads the same tensors by itself."""
    tensors, run = some_tensors(), create_run(Home.at(tmp_path), {})
    saved = save(run, 1, tensors, {}, ALONE)
    with pytest.warns(UserWarning):
        dcp.save(dict(tensors), checkpoint_id=tmp_path / "torch", no_dist=True)
    read: list[dict[str, torch.Tensor]] = []
    for folder in (saved.folder, tmp_path / "torch"):
        empty = {name: torch.zeros_like(value) for name, value in tensors.items()}
        with pytest.warns(UserWarning):
            dcp.load(empty, checkpoint_id=folder, no_dist=True)
        read.append(empty)
    for name, value in tensors.items():
        assert torch.equal(read[0][name], value) and torch.equal(read[1][name], value)


def test_containers_are_zip_files_with_right_checksums(tmp_path: Path) -> None:
    tensors = some_tensors()
    saved = save(create_run(Home.at(tmp_path), {}), 1, tensors, {}, ALONE)
    places, size = save_plan.file_layout(balance([save_plan.local_chunks(tensors)])[0])
    content = (saved.folder / "__0_0.distcp").read_bytes()
    assert len(content) == size
    for place in places:
        item = tmp_path / "item.zip"
        item.write_bytes(content[place.offset : place.offset + place.length])
        with zipfile.ZipFile(item) as archive:
            assert archive.testzip() is None
        assert torch.equal(torch.load(item, weights_only=True), tensors[place.chunk.name])


# --- ranks


def on_mesh(rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    wide, tall, plain = torch.randn(512, 128), torch.randn(50, 6), torch.randn(300, 100)
    return {
        "hybrid": distribute_tensor(wide, mesh, [Replicate(), Shard(0)]),
        "uneven": distribute_tensor(tall, mesh, [Shard(0), Shard(1)]),
        "plain": plain,
        f"own_{rank}": torch.full((3,), float(rank)),
    }


def save_on_ranks(folder: str) -> int:
    import torch.distributed as dist

    rank = dist.get_rank()
    save(Run(folder=Path(folder)), 1, on_mesh(rank), {}, Consensus(rank=rank, size=4))
    return (Path(folder) / "checkpoints" / "1" / f"__{rank}_0.distcp").stat().st_size


def test_four_ranks_share_the_work_and_one_reads_it(tmp_path: Path, ranks: Ranks) -> None:
    run = create_run(Home.at(tmp_path), {})
    sizes = ranks.run(4, save_on_ranks, str(run.folder))
    data = 4 * (512 * 128 + 50 * 6 + 300 * 100 + 12)
    assert max(sizes) < 1.1 * data / 4 + 8 * 1600, "a quarter each, and containers"
    torch.manual_seed(5)
    expected = {"hybrid": torch.randn(512, 128), "uneven": torch.randn(50, 6), "plain": torch.randn(300, 100)}
    expected |= {f"own_{rank}": torch.full((3,), float(rank)) for rank in range(4)}
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(run.checkpoint(1), found, ALONE)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
