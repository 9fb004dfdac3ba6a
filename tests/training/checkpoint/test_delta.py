"""Deltas: the same bits from fewer bytes, on any layout, and only where they pay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.parallel.consensus import Consensus
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import delta
from armillary.training.checkpoint.checkpoint import load, newest, saved_steps
from armillary.training.checkpoint.delta_schedule import DeltaSchedule
from armillary.training.checkpoint.save_in_flight import Saved
from armillary.training.checkpoint.saver import Saver
from armillary.training.loop import train
from tests.ranks import Ranks
from tests.training.checkpoint.test_checkpoint import Make, begin, cut_off

ALONE = Consensus(rank=0, size=1)


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=300), noise=st.binary(min_size=300, max_size=300), width=st.sampled_from([1, 2, 4, 8]))
def test_every_byte_comes_back(data: bytes, noise: bytes, width: int) -> None:
    raw = data[: len(data) // width * width]
    base = noise[: len(raw)]
    item = delta.join([delta.encode(raw[a:b], base[a:b], width) for a, b in delta.pieces(len(raw))])
    assert delta.decode(item, lambda a, b: base[a:b], len(raw), width) == raw


def test_weights_that_moved_a_little_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "PIECE", 1 << 16)
    torch.manual_seed(0)
    before = torch.randn(100_000)
    after = before + 1e-4 * torch.randn(100_000)
    raw, base = (tensor.numpy().tobytes() for tensor in (after, before))
    item = delta.join([delta.encode(raw[a:b], base[a:b], 4) for a, b in delta.pieces(len(raw))])
    assert len(item) < 0.75 * len(raw)
    assert delta.decode(item, lambda a, b: base[a:b], len(raw), 4) == raw
    noise = torch.randint(0, 256, (400_000,), dtype=torch.uint8).numpy().tobytes()
    assert len(delta.encode(noise, base, 4)) <= len(noise) + 20, "what cannot be compressed is stored as it is"


def trained(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70_000, generator=generator) + 1e-5 * step
    return {"w": weight, "half": weight.bfloat16(), "step": torch.tensor(float(step))}


def save_steps(run: Run, steps: range, ranks: Consensus, full_every: int) -> list[Saved]:
    saver = Saver(run, ranks, full_every=full_every)
    for step in steps:
        saver.save(step, trained(step), {})
    saver.finish()
    saver.close()
    return saver.take_saved()


def same(run: Run, step: int) -> bool:
    found = {name: torch.zeros_like(value) for name, value in trained(step).items()}
    load(run.checkpoint(step), found, ALONE)
    return all(torch.equal(found[name], value) for name, value in trained(step).items())


def test_full_ones_and_deltas_of_them(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    done = save_steps(run, range(1, 7), ALONE, 3)
    assert [saved.delta_of for saved in done] == [None, 1, 1, None, 4, 4]
    assert all(0.1 < saved.saved_fraction < 1 for saved in done if saved.delta_of)
    assert all(same(run, step) for step in range(1, 7))
    assert newest(run, ALONE) == 6


def test_a_delta_is_no_better_than_its_full_checkpoint(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    save_steps(run, range(1, 4), ALONE, 2)
    path = run.checkpoint(1) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert newest(run, ALONE) == 3
    run.checkpoint(3).rename(tmp_path / "3")
    said: list[str] = []
    assert newest(run, ALONE, said.append) == 0
    assert "checkpoint 2" in said[0] and "checkpoint 1" in said[1]
    assert saved_steps(run) == []


def test_deltas_that_save_little_are_switched_off(tmp_path: Path) -> None:
    saver = Saver(create_run(Home.at(tmp_path), {}), ALONE, full_every=9)
    for step in range(1, 4):
        noise = torch.randint(0, 256, (200_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(step))
        saver.save(step, {"noise": noise}, {})
    saver.finish()
    saver.close()
    done = saver.take_saved()
    assert [saved.delta_of for saved in done] == [None, 1, None]
    assert saver.take_notes() == ["checkpoint 2 saved only 0% as a delta of 1: this run writes full ones from now on"]


def test_the_schedule_needs_a_full_checkpoint_that_is_there(tmp_path: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    schedule = DeltaSchedule(full_every=4)
    assert schedule.next_base(run) is None
    schedule.committed(7, None, 0.0)
    assert schedule.next_base(run) is None, "7 is not there"


def on_rank(folder: str) -> None:
    import torch.distributed as dist

    ranks = Consensus(rank=dist.get_rank(), size=2)
    save_steps(Run(folder=Path(folder)), range(1, 4), ranks, 3)


def test_deltas_of_two_ranks_are_read_by_one(tmp_path: Path, ranks: Ranks) -> None:
    run = create_run(Home.at(tmp_path), {})
    ranks.run(2, on_rank, str(run.folder))
    assert sorted(path.name for path in run.checkpoint(2).glob("*.delta")) == ["__0_0.delta", "__1_0.delta"]
    assert all(same(run, step) for step in (1, 2, 3))


def test_a_run_with_deltas_goes_on_with_the_same_bits(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=7", "train.save_every=1", "train.checkpoint_full_every=4", "train.keep=2"), home)
    expected = train(begun.plan, begun.create_run())
    run: Run = cut_off(begun, 4)
    records = [record for record in read_gauges(run.gauges) if "checkpoint_delta_saved_fraction" in record]
    assert records and 5 in run.checkpoint_steps()
    done = train(begun.plan, run)
    assert done.resumed_at == 5 and done.loss == expected.loss
    assert done.export is not None and expected.export is not None
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (done.export, expected.export))
    assert ours == theirs
