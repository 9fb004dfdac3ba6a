"""torchrun: which targets it is, and what its ranks are started with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch.distributed import run

from armillary.profiling.record.run_script import (
    follow_launcher,
    inside,
    is_recorded_rank,
    is_torchrun,
    rank_note,
    split,
)


@pytest.mark.parametrize(
    ("target", "is_one"),
    [
        (["-m", "torch.distributed.run", "x.py"], True),
        (["-m", "torch.distributed.launch", "x.py"], True),
        (["/some/bin/torchrun", "x.py"], True),
        (["x.py", "torchrun"], False),
        (["-m", "x"], False),
    ],
)
def test_launchers(target: list[str], is_one: bool) -> None:
    assert is_torchrun(target) == is_one


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--nproc-per-node", "2", "x.py", "-m", "3"], ["-u", "!", "x.py", "-m", "3"]),
        (["-m", "mine.train", "--lr", "1"], ["-u", "!", "-m", "mine.train", "--lr", "1"]),
        (["--no-python", "python3", "-X", "dev", "x.py"], ["-X", "dev", "!", "x.py"]),
        (["--no-python", "/bin/echo", "x.py"], ["x.py"]),
    ],
)
def test_every_rank_is_started_through_ours(
    monkeypatch: pytest.MonkeyPatch, words: list[str], command: list[str]
) -> None:
    def ours(given: Sequence[str]) -> list[str]:
        options, target = split(given)
        return [*options, "!", *target]

    monkeypatch.setattr(run, "config_from_args", run.config_from_args)  # put back afterwards
    follow_launcher(ours)
    assert run.config_from_args(run.parse_args(words))[2] == command


def test_the_first_rank_of_a_machine_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert is_recorded_rank() and rank_note() == ""
    for name, value in (("RANK", "8"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    assert is_recorded_rank() and rank_note() == "rank 8 of 16 was recorded"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_recorded_rank()


def test_ours_comes_after_the_options_of_python() -> None:
    option, run_code, code, *rest = inside("request.json", ["-u"], ["x.py", "1"], "rank")
    assert (option, run_code, rest) == ("-u", "-c", ["request.json", "x.py", "1"])
    assert "sys.path.append" in code and code.endswith("rank()")
