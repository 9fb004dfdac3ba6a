"""A tiny corpus and recipes that train on it in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        lines = [f"def function_{i}_{j}(x):\n    return x + {j}\n" for j in range(12)]
        (folder / f"{i}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path / "home")


@pytest.fixture
def recipe(corpus: Path) -> Callable[..., Recipe]:
    """`recipe("train.steps=3")`: a 2-layer model on the corpus, with overrides."""
    base: dict[str, dict[str, Any]] = {
        "model": {
            "name": "armillary-2m",
            "num_layers": 2,
            "hidden": 32,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 64,
            "vocab": 320,
            "head_dim": 8,
            "context": 128,
        },
        "hardware": {"on": "here"},
        "data": {"source": str(corpus), "held_out": 0.1},
        "layout": {"precision": "fp32", "micro_batch": 4},
        "train": {
            "sequence": 32,
            "batch_tokens": 256,
            "steps": 12,
            "eval_every": 6,
            "eval_batches": 2,
            "profile_every": 0,
        },
    }
    return lambda *overrides: recipe_from_dict(base, overrides)


@pytest.fixture(autouse=True)
def any_precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test asks for is trained in, however slow this CPU is in it; that such a dtype is refused has its own."""
    if request.module.__name__.rpartition(".")[2] != "test_auto_precision":
        monkeypatch.setattr("armillary.profiling.dtypes.choice.check_asked", lambda dtype, rates, key: "")
