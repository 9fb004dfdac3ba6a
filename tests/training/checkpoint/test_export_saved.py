"""A checkpoint as a Hugging Face folder: what the run itself exports, with adapters and from a delta, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.store.home import Home
from armillary.training.checkpoint.export_saved import export_saved
from armillary.training.loop import train
from tests.training.checkpoint.test_checkpoint import Make, begin


@pytest.mark.parametrize("change", ["train.lora_rank=0", "train.lora_rank=2", "train.checkpoint_full_every=3"])
def test_it_is_what_the_run_exports(change: str, recipe: Make, home: Home, tmp_path: Path) -> None:
    begun = begin(recipe("train.steps=3", "train.save_every=1", change), home)
    run = begun.create_run()
    done = train(begun.plan, run)
    folder = export_saved(run, 3, tmp_path / "exported")
    assert done.export is not None
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (done.export / name).read_bytes()
