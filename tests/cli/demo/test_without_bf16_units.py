"""A CPU without bf16 units from ceilings to an answer: on x86 oneDNN is held to AVX2, which emulates one."""

from __future__ import annotations

import json
import platform
import re
import time
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.demo.serve_and_load import ask
from armillary.machine.features import has_native
from armillary.store.home import Home
from armillary.store.peaks import load_peaks
from armillary.store.runs import find_run
from tests.fork_server import ForkServer

MEASURED = ("--only", "gemm", "--only", "attention", "--only", "bandwidth")
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


@pytest.mark.skipif(has_native("bf16") is False, reason="this CPU has no bf16 units: test_demo.py runs without them")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="ONEDNN_MAX_CPU_ISA is for x86 only")
def test_ceilings_plan_ten_steps_and_an_answer(tmp_path: Path) -> None:
    with ForkServer({"ONEDNN_MAX_CPU_ISA": "AVX2"}) as narrow:
        ceilings_to_an_answer(tmp_path, narrow)


def ceilings_to_an_answer(tmp_path: Path, narrow: ForkServer) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"line one of {i}\nthe quick brown fox number {i} jumps\n" * 6)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("TEXT", str(text)))
    armillary(narrow, tmp_path, "bench", "ceilings", "--quick", *MEASURED)
    plan = armillary(narrow, tmp_path, "plan", str(recipe))["plan"]
    assert plan["layout"]["precision"] == "fp32" and "bf16" in plan["chosen"]["layout.precision"]
    outcome = armillary(narrow, tmp_path, "train", str(recipe), "--run", "wide")
    assert outcome["finished"] and outcome["steps"] == 10
    home = Home.at(tmp_path)
    names = [json.loads(stored.read_text())["device"] for stored in home.peaks.glob("*avx2*.json")]
    (peaks,) = [found for name in names if (found := load_peaks(home, name)) is not None and "gemm" in found.points]
    assert peaks.is_emulated("bf16") and not peaks.is_emulated("fp32")
    folder = find_run(home, "wide").folder
    line = ["serve", str(folder), "--port", "0", "--recipe", str(recipe), "--home", str(tmp_path)]
    serving = narrow.start(line, tmp_path / "serve")
    while (ready := re.search(r"ready on (http://\S+)", serving.out)) is None:
        assert serving.poll() is None, serving.err
        time.sleep(0.05)
    assert isinstance(ask(ready[1], "the quick", tokens=4), str)


def armillary(narrow: ForkServer, home: Path, *args: str) -> Any:
    ran = narrow.start([*args, "--home", str(home), "--json"], home / args[0], cwd=home)
    assert ran.wait(240) == 0, ran.err
    return json.loads(ran.out)
