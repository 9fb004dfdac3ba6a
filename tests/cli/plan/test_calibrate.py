"""`armillary plan calibrate`: runs of ours and logs with their recipe correct later plans, until that is removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.logs import titan_log

Cli = Callable[..., Any]
JOB = (
    '[model]\nname = "llama-3-8b"\n[hardware]\non = "h100x16"\n[layout]\nprecision = "bf16"\nmicro_batch = 1\n'
    "{layout}\n"
    "[train]\nsequence = 4096\nbatch_tokens = 1_048_576\n"
)
LAYOUTS = ("dp = 16\nzero = 3", "tp = 2\ndp = 8\nzero = 1", "pp = 2\ndp = 8\nzero = 1")


@pytest.fixture
def logs(cli: Cli, tmp_path: Path) -> list[str]:
    """Logs of torchtitan whose steps take a quarter longer than planned, with their recipes."""
    found = []
    for i, layout in enumerate(LAYOUTS):
        recipe, log = tmp_path / f"job{i}.toml", tmp_path / f"job{i}.log"
        recipe.write_text(JOB.format(layout=layout))
        planned = float(cli("plan", str(recipe), "-q").out)
        log.write_text(titan_log(step_s=lambda step, planned=planned: 1.25 * planned))
        found.append(f"{log}={recipe}")
    return found


def test_logs_correct_later_plans_until_it_is_removed(cli: Cli, logs: list[str], tmp_path: Path) -> None:
    recipe = str(tmp_path / "job0.toml")
    before = float(cli("plan", recipe, "-q").out)
    done = cli("plan", "calibrate", *logs, "--json").json
    assert done["kept"] and done["error_left_out"] < done["error_before"] and done["chip"] == "h100-sxm"
    after = cli("plan", recipe)
    assert "corrected by 3 runs" in " ".join(after.out.split())
    assert 1.1 * before < float(cli("plan", recipe, "-q").out) < 1.4 * before
    assert "h100-sxm" in cli("plan", "calibrate").out
    assert "no longer corrected" in cli("plan", "calibrate", "--remove", "h100-sxm").out
    assert float(cli("plan", recipe, "-q").out) == before
    assert "no corrections are stored" in cli("plan", "calibrate").out


def test_what_cannot_be_used_is_one_line(cli: Cli, logs: list[str], tmp_path: Path) -> None:
    log, _, recipe = logs[0].partition("=")
    assert "has no plan" in cli("plan", "calibrate", log).err
    assert "takes no runs" in cli("plan", "calibrate", log, "--remove", "h100").err
    other = tmp_path / "other.toml"
    other.write_text(Path(recipe).read_text().replace("h100x16", "h200x16"))
    assert "different chips" in cli("plan", "calibrate", logs[0], f"{log}={other}").err
    page = tmp_path / "gauges.jsonl"
    page.write_text(json.dumps({"engine_step_s": 0.01, "step": 1}) + "\n")
    assert "has no plan" in cli("plan", "calibrate", str(page)).err


def test_pages_of_a_server_correct_later_serving_plans(cli: Cli, tmp_path: Path) -> None:
    """Four load tests of a real vLLM on an RTX 4090, and the page of an SGLang."""
    pages = sorted((Path(__file__).parents[2] / "diagnosis" / "data" / "rtx4090").glob("*.prom"))
    recipe = tmp_path / "vllm.toml"
    recipe.write_text('[model]\nname = "qwen2.5-7b"\n[hardware]\non = "rtx-4090"\n[layout]\nprecision = "bf16"\n')
    done = cli("plan", "calibrate", *(f"{page}={recipe}" for page in pages), "--json").json
    assert (done["work"], done["kept"]) == ("serving", True) and done["error_left_out"] < 0.7 * done["error_before"]
    assert "corrected by 4 runs" in " ".join(cli("plan", str(recipe), "--for", "serve").out.split())
    assert "no longer corrected" in cli("plan", "calibrate", "--remove", "rtx-4090").out
    sglang = pages[0].parents[1] / "sglang_overloaded.prom"
    assert cli("plan", "calibrate", f"{sglang}={recipe}", "--json").json["work"] == "serving"
    assert "has no plan" in cli("plan", "calibrate", str(sglang)).err


def test_training_and_serving_are_corrected_apart(cli: Cli, logs: list[str], tmp_path: Path) -> None:
    _, _, recipe = logs[0].partition("=")
    page = Path(__file__).parents[2] / "diagnosis" / "data" / "sglang_overloaded.prom"
    assert "different kinds" in cli("plan", "calibrate", logs[0], f"{page}={recipe}").err
