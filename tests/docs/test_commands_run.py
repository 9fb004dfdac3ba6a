"""Every command of README and docs is run, page by page, in a folder that has what the pages speak of; what is left out
is listed with its reason. Training is cut to a few steps on short sequences, and load tests to two seconds; servers are
started until they say that they are ready. What only reads the catalogue or plans runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import commands, pages_with_commands, words_of
from tests.docs.workspace import Workspace, workspace

LEFT_OUT = {
    r"^launch .*(slurm|kubernetes|ray)|^launch (logs|cancel) ": "needs a scheduler: tests/services, tests/cluster",
    r"^train RECIPE --nodes": "needs several nodes: tests/services/test_two_hosts.py",
    r"s3://|mlflow:|--on ray": "needs a store, MLflow or Ray: tests/store, tests/services",
    r"--sign |trusted_keys": "needs a key pair: tests/store/registry",
    r"^models Qwen/|-AWQ": "needs the Hub: make test-hub",
    r"--tasks": "needs lm-eval: make peers",
    r"^bench kernels|^parity": "takes minutes: tests/profiling/kernel_bench, tests/training/test_many_ranks.py",
    r"^bench ceilings$": "takes minutes: tests/profiling/ceilings; --show is run",
    r"^bench collectives": "tests/profiling/ceilings",
    r"^canary RECIPE$": "compares with values that a run of the same machine left: tests/training/test_canary.py",
    r"model-code|model\.code": "needs a GPT-OSS folder: tests/model/test_own_family.py",
    r"^gateway (--config|admin)": "needs a configuration with an administrator's key: tests/fleet/gateway",
    r"^bench serve": "takes minutes: tests/engine/bench",
    r"^launch RECIPE( --nodes 1)?$": "needs hosts: tests/services/test_two_hosts.py",
    r"layout\.(cp|pp|ep|tp)=2": "needs ranks: tests/parallel, tests/training/test_many_ranks.py",
    r"^demo|layout\.tp=3$|lama-3-8b$": "shown by tests/cli/demo and by tests/test_readme.py, which expects the error",
}
"""commands that are not run -> why, and what shows them instead"""
SMALL = (
    "train.steps=2",
    "train.sequence=64",
    "train.batch_tokens=512",
    "layout.dp=1",
    "data.vocab=512",
    "data.source=text",
)
NAMES = {
    "fleet-crane": "quiet-otter",
    "amber-hare": "bold-heron",
    "RUN": "quiet-otter",
    "[RUN]": "quiet-otter",
    "$RUN": "quiet-otter",
    "$SERVED": "quiet-otter",
    "runs/quiet-otter/export/200": "model",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with workspace(tmp_path_factory.mktemp("docs")) as place:
        yield place


def reason(line: str) -> str:
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, line)), "")


def adapted(words: list[str], place: Workspace) -> list[str]:
    """The same command with what exists here: names, addresses, and sizes that take seconds."""
    words = [NAMES.get(word, word) for word in words]
    words = [re.sub(r"http://127\.0\.0\.1:\d+", place.urls[0], word) for word in words]
    verb = words[0]
    if verb == "load":
        words += ["--duration", "2"] if "--duration" not in words and "--search" not in words else []
    if verb == "train" and any(word.startswith(("recipes/", "RECIPE")) for word in words):
        words += [part for each in SMALL for part in ("--set", each)]
    if verb in ("serve", "web", "gateway"):
        words = [word for i, word in enumerate(words) if "--port" not in (word, words[i - 1]) and word != "--open"]
        words += ["--port", "0", *(["--device", "cpu"] if verb == "serve" and not words[1].endswith(".pt2") else [])]
    return words


def ran(words: list[str], place: Workspace) -> tuple[int, str]:
    if words[0] == "serve":
        return place.serves(words, "ready on http")
    if words[0] == "web" or (words[0] == "gateway" and words[1] != "keys"):
        return place.serves(words, "http://127.0.0.1")
    return place.run(words)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, place: Workspace) -> None:
    failed, count = {}, 0
    for line in dict.fromkeys(commands(page)):
        words = words_of(line)
        if reason(" ".join(words)):
            continue
        count += 1
        code, printed = ran(adapted(words, place), place)
        if code != 0 or not printed.strip():
            failed[line] = (code, printed[-600:])
    assert failed == {}
    if not count:
        pytest.skip("nothing on this page can be run here")


def test_what_is_left_out_is_still_there() -> None:
    """A reason whose command has gone goes as well; and most commands are run."""
    lines = [" ".join(words_of(line)) for page in pages_with_commands() for line in commands(page)]
    assert [pattern for pattern in LEFT_OUT if not any(re.search(pattern, line) for line in lines)] == []
    assert sum(not reason(line) for line in lines) > 0.7 * len(lines)
