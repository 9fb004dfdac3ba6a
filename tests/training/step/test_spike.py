"""Loss spikes: found against the last losses, named by their samples, skipped or rewound."""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armillary.errors import ArmillaryError, BadRecipe
from armillary.kernels.optimizer.adamw import AdamW
from armillary.parallel.consensus import Consensus
from armillary.spec.recipe import Recipe
from armillary.spec.tables.train import TrainJob
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.data.batch_sources import Batches
from armillary.training.data.row_origin import row_origins, shards_text
from armillary.training.loop import train
from armillary.training.open_data import open_data
from armillary.training.prepare_data import prepare
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.run_lifecycle import Trained
from armillary.training.step.spike import FEWEST, MOST_IN_A_ROW, SpikeGuard

Make = Callable[..., Recipe]
STEPS = 150


def guard(on_spike: Any = "skip", **options: Any) -> SpikeGuard:
    made = SpikeGuard(
        TrainJob(on_spike=on_spike),
        Consensus(rank=0, size=1),
        torch.optim.SGD([torch.zeros(1)]),
        scaled=False,
        **options,
    )
    for number in range(FEWEST):
        made.check(number, {"loss": 3.0 + 0.01 * (number % 5), "grad_norm": 1.0})
    return made


def test_a_spike_is_far_above_the_last_losses() -> None:
    guarded = guard()
    assert 3.3 < guarded.limit < 3.6
    loss = torch.tensor([3.2, 9.0])
    assert guarded.guarded(loss).tolist() == [pytest.approx(3.2), math.inf]
    guarded.check(30, {"loss": 9.0, "grad_norm": 1.0})
    assert guarded.skipped == 1 and guarded.limit < 3.6, "a spike does not raise the limit"
    guarded.check(31, {"loss": 3.1, "grad_norm": 1.0})
    assert guarded.skipped == 1


def test_nothing_is_judged_before_enough_is_known() -> None:
    fresh = SpikeGuard(
        TrainJob(on_spike="stop"), Consensus(rank=0, size=1), torch.optim.SGD([torch.zeros(1)]), scaled=False
    )
    fresh.check(0, {"loss": 3.0, "grad_norm": 1.0})
    fresh.check(1, {"loss": 900.0, "grad_norm": 1.0})
    assert fresh.limit == math.inf


def test_warn_reports_and_changes_nothing() -> None:
    said: list[str] = []
    warned = guard("warn")
    warned.said, warned.samples = said.append, lambda step, why: "; its rows are from a.bin (8 rows)"
    loss = torch.tensor(9.0)
    assert warned.guarded(loss) is loss
    warned.check(40, {"loss": 9.0, "grad_norm": 1.0})
    warned.check(41, {"loss": 3.0, "grad_norm": 30.0})
    assert "loss 9 at step 40 is a spike" in said[0] and "a.bin" in said[0] and "on_spike=skip" in said[0]
    assert "gradient norm 30 at step 41 is 30 times the usual" in said[1]


def test_stop_and_too_many_in_a_row_end_the_run() -> None:
    with pytest.raises(ArmillaryError, match="loss 9 at step 40 is a spike"):
        guard("stop").check(40, {"loss": 9.0, "grad_norm": 1.0})
    many = guard()
    with pytest.raises(ArmillaryError, match=r"is a spike .*a lower train\.lr"):
        for step in range(MOST_IN_A_ROW):
            many.check(40 + step, {"loss": 9.0, "grad_norm": 1.0})
    assert many.skipped == MOST_IN_A_ROW - 1


def test_what_a_guard_knows_is_in_a_checkpoint() -> None:
    before, after = guard(), guard()
    after.load({})
    assert after.limit == math.inf
    after.load(before.state())
    assert after.limit == before.limit


def test_fp16_scales_by_itself() -> None:
    with pytest.raises(BadRecipe, match="on_spike=skip needs another precision than fp16"):
        SpikeGuard(TrainJob(on_spike="skip"), Consensus(rank=0, size=1), torch.optim.SGD([torch.zeros(1)]), scaled=True)


# --- samples by name, and a corrupt shard


@pytest.fixture
def begun(recipe: Make, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedRun]:
    """A run on text in many small shards, read one after the other."""
    for i in range(300):
        lines = [f"def function_{i}_{j}(x):\n    return x + {j}\n" for j in range(12)]
        (tmp_path / f"text-{i}.py").write_text("\n".join(lines))
    monkeypatch.setitem(prepare.__kwdefaults__, "shard_tokens", 1500)

    def make(*overrides: str) -> ResolvedRun:
        asked = recipe(
            "data.mix_shards=1",
            f"data.source={tmp_path}/text-*.py",
            "train.lr=0.006",
            f"train.steps={STEPS}",
            "train.eval_every=0",
            "train.save_every=10",
            *overrides,
        )
        made = resolve_run(asked, home, model_source(asked, home))
        made.prepare()
        return made

    return make


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_rows_are_named_by_shard_and_document(packing: str, begun: Callable[..., ResolvedRun]) -> None:
    plan = begun(f"data.packing={packing}").plan
    assert plan.data is not None and plan.train is not None
    source = open_data(plan.data, plan.train).train
    assert isinstance(source, Batches)
    batch, origins = source.at(3), row_origins(source, 3)
    assert {origin.row for origin in origins} == set(range(source.batch))
    names = [source.shards.files.name(number) for number in range(source.shards.num_shards)]
    for row in range(source.batch):
        held: set[int] = set()
        for origin in (each for each in origins if each.row == row):
            base = int(source.shards.first_documents[names.index(origin.shard)])
            for document in range(origin.first, origin.last + 1):
                held |= set(source.shards.document(base + document).tolist())
        learnt = batch.targets_BT[row] >= 0
        assert set(batch.tokens_BT[row][learnt].tolist()) <= held
    assert "rows" in shards_text(origins)


def corrupt(begun: ResolvedRun, step: int) -> tuple[str, dict[Path, bytes]]:
    """Random ids in the shard that is read at a step, with the checksum of that; the shard's name, and files as they
    were."""
    plan = begun.plan
    assert plan.data is not None and plan.train is not None
    source = open_data(plan.data, plan.train).train
    name = row_origins(source, step)[0].shard
    path, listing = Path(name), Path(plan.data.path) / "index.json"
    before = {path: path.read_bytes(), listing: listing.read_bytes()}
    ids, index = np.fromfile(path, dtype="<u2"), json.loads(before[listing])
    path.write_bytes(np.random.default_rng(0).integers(0, index["vocab"], len(ids)).astype("<u2").tobytes())
    files = index["splits"]["train"]
    entry = next(each for each in files if each["file"] == path.relative_to(listing.parent).as_posix())
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    listing.write_text(json.dumps(index))
    return name, before


def trained(begun: ResolvedRun) -> tuple[Run, Trained, list[str]]:
    said: list[str] = []
    run = begun.create_run()
    return run, train(begun.plan, run, say=said.append), said


def library(folder: Path, seed: int) -> tuple[str, ...]:
    """Overrides for other text than the guard was set up on: modules of Python, in short pieces. Batches of 256 tokens
    of it vary as much as a spike. With the learning rate of the other tests, runs whose rates differ by 0.2 % end 5 %
    apart; with this one, 0.3 %."""
    modules = Path(sysconfig.get_path("stdlib"))
    for path in (*modules.glob("asyncio/*.py"), *modules.glob("email/*.py")):
        lines = path.read_text().splitlines(keepends=True)
        for at in range(0, len(lines), 25):
            (folder / f"library-{path.stem}-{at}.py").write_text("".join(lines[at : at + 25]))
    seeds = f"train.seed={seed}", f"data.seed={seed}"
    sizes = (
        "train.lr=0.002",
        "train.steps=450",
        "train.batch_tokens=2048",
        "layout.micro_batch=16",
        "train.eval_batches=8",
    )
    return f"data.source={folder}/library-*.py", *seeds, *sizes


def leave_out_updates(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from now on make no update in these steps."""
    now = count()

    def guarded(self: SpikeGuard, loss: torch.Tensor) -> torch.Tensor:
        return torch.full_like(loss, torch.inf) if next(now) in steps else loss

    def check(self: SpikeGuard, step: int, values: Any) -> None:
        if step in steps and isinstance(self._optimizer, AdamW):
            self._optimizer.uncount()

    monkeypatch.setattr(SpikeGuard, "guarded", guarded)
    monkeypatch.setattr(SpikeGuard, "check", check)


@pytest.mark.slow
@pytest.mark.parametrize(("action", "seed"), [("skip", 7), ("skip", 11), ("rewind", 7), ("rewind", 11), ("rewind", 13)])
def test_a_corrupt_shard_is_named_and_left_out(
    action: str,
    seed: int,
    begun: Callable[..., ResolvedRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rewound run ends as a clean one. Where batches are skipped, there are as many updates less: it ends as a run on
    clean data that leaves out the same ones."""
    overrides = library(tmp_path, seed)
    monkeypatch.setitem(prepare.__kwdefaults__, "shard_tokens", 8000)  # several batches
    _, clean, quiet = trained(begun("train.on_spike=stop", *overrides))
    assert not [line for line in quiet if "spike" in line]
    faulty = begun(f"train.on_spike={action}", *overrides)
    shard, before = corrupt(faulty, 150)
    run, done, said = trained(faulty)
    skipped = [json.loads(line) for line in (run.folder / "skipped_batches.jsonl").read_text().splitlines()]
    spikes = [line for line in said if "is a spike" in line]
    assert len(spikes) == len(skipped) > 2 and shard in spikes[0]
    random = [record for record in skipped if float(record["why"].split()[1]) > 4]
    assert len(random) > 2 and random[0] == skipped[0]
    assert all(shard in {row["shard"] for row in record["rows"]} for record in random), skipped
    steps = [record["step"] for record in read_gauges(run.gauges)]
    assert steps == list(range(done.steps)), "each step is recorded once"
    last = list(read_gauges(run.gauges))[-1]
    assert last["skipped_steps_total"] == len(skipped)
    assert ("goes back" in spikes[0]) == (action == "rewind")
    if action == "skip":
        for path, content in before.items():
            path.write_bytes(content)
        leave_out_updates({record["step"] for record in skipped}, monkeypatch)
        _, clean, _ = trained(begun("train.on_spike=skip", *overrides))
    assert done.finished and clean.val_loss and done.val_loss
    print(f"{action}, seed {seed}: {done.val_loss:.4f}, clean {clean.val_loss:.4f}, {len(skipped)} batches left out")
    assert done.val_loss == pytest.approx(clean.val_loss, rel=0.01)
