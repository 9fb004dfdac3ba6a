"""A CPU without bf16 units from ceilings to an answer: on x86 oneDNN is held to AVX2, which emulates one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.demo.serve_and_load import ask, server
from armillary.cli.output import Output
from armillary.store.home import Home
from armillary.store.peaks import load_peaks
from armillary.store.runs import find_run

ROOT = Path(__file__).parents[3]
RECIPE = """
[model]
name = "armillary-2m"
num_layers = 1
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
ffn = 128
vocab = 320
context = 256

[data]
source = "TEXT"

[train]
sequence = 64
batch_tokens = 512
steps = 10

[serve]
max_model_len = 128
kv_bytes = 4_000_000
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="ONEDNN_MAX_CPU_ISA is for x86 only")
def test_ceilings_plan_ten_steps_and_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"line one of {i}\nthe quick brown fox number {i} jumps\n" * 6)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("TEXT", str(text)))
    armillary(tmp_path, "bench", "ceilings", "--quick", "--only", "gemm", "--only", "attention", "--only", "bandwidth")
    plan = armillary(tmp_path, "plan", str(recipe))["plan"]
    assert plan["layout"]["precision"] == "fp32" and "bf16" in plan["chosen"]["layout.precision"]
    outcome = armillary(tmp_path, "train", str(recipe), "--run", "wide")
    assert outcome["finished"] and outcome["steps"] == 10
    home = Home.at(tmp_path)
    names = [json.loads(stored.read_text())["device"] for stored in home.peaks.glob("*avx2*.json")]
    (peaks,) = [found for name in names if (found := load_peaks(home, name)) is not None and "gemm" in found.points]
    assert peaks.is_emulated("bf16") and not peaks.is_emulated("fp32")
    with server(home, find_run(home, "wide"), recipe, show=Output("silent")) as (url, _):
        assert isinstance(ask(url, "the quick", tokens=4), str)


def armillary(home: Path, *args: str) -> Any:
    line = [sys.executable, "-m", "armillary", *args, "--home", str(home), "--json"]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=240, env=dict(os.environ), cwd=home)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
