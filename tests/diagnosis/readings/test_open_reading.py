"""Whatever a person points at: told by how it begins, refused in one line with what can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.readings.open_reading import open_reading
from armillary.store.home import Home
from tests.diagnosis.logs import megatron_log, titan_log
from tests.diagnosis.trained import plan_of, run_of

DATA = Path(__file__).parents[1] / "data"
Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("name", "kind", "by"),
    [
        ("synthetic_vllm_kv_full.prom", "serving", "vllm"),
        ("hf_loop_slow_dataset.json.gz", "profile", "torch-profiler"),
        ("hf_trainer_eval_often.log", "training", "hf-trainer"),
        ("hf_trainer_state.json", "training", "hf-trainer"),
    ],
)
def test_files_whatever_their_name(tmp_path: Path, home: Home, name: str, kind: str, by: str) -> None:
    path = tmp_path / "download"
    path.write_bytes((DATA / name).read_bytes())
    reading = open_reading(str(path), home)
    assert (reading.kind, reading.by, reading.source) == (kind, by, str(path))


def test_logs(tmp_path: Path, home: Home) -> None:
    for text, by in ((titan_log(), "torchtitan"), (megatron_log(), "megatron")):
        path = tmp_path / f"{by}.txt"
        path.write_text(text)
        assert open_reading(str(path), home).by == by


def test_gauges_by_content(tmp_path: Path, home: Home) -> None:
    run = run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)
    copy = tmp_path / "gauges.txt"
    copy.write_bytes(run.gauges.read_bytes())
    for target in (run.name, str(run.gauges), str(copy), str(run.gauges.parent)):
        reading = open_reading(target, home)
        assert reading.kind == "training" and reading.get("data_wait_s") == 0.5, target


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"\x1f\x8b broken",
        b'{"a": 1}\n',
        b"[1, 2]\n",
        b"\x00\xff\xfe",
        b"{'loss': 'x'\n",
        b"SQLite format 3\x00",
    ],
)
def test_anything_else_is_one_line_that_ends_with_the_next_step(tmp_path: Path, cli: Cli, content: bytes) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    ran = cli("diagnose", str(path))
    assert ran.code == 2 and ran.out == "" and len(ran.err.splitlines()) == 1 and "x.bin" in ran.err, ran.err


def test_what_is_not_there(cli: Cli) -> None:
    for target in ("none", "none.json", "http://127.0.0.1:9"):
        ran = cli("diagnose", target)
        assert ran.code == 2 and len(ran.err.splitlines()) == 1
