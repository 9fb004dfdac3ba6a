"""Every command of README and docs is run, page by page, in a folder of its own that has what the pages speak of.
Training is cut to a few steps on short sequences, and load tests to two seconds; servers are started until they say
that they are ready. What only reads the catalogue or plans runs as it stands. Commands that are not run here are listed
with the reason; that they can be typed is shown by test_commands_parse.py. What was run, and for how long, is written
to build/documented_commands.md.

pytest -m slow tests/docs                                   all pages
pytest -m slow tests/docs -k 'README or tour'               some; `not (README or tour)` the others
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from armillary.store.runs import ADJECTIVES, ANIMALS
from tests.docs.commands import ROOT, commands, pages_with_commands, words_of
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
    r"adapters=FOLDER": "needs adapters: tests/serving/openai/test_adapter_api.py",
    r"serve\.role=": "needs two hosts: tests/serving/processes/test_two_roles.py",
    r"--replay decisions": "needs what an autoscaler logged: tests/cli/simulate/test_simulate.py",
    r"^rollout ": "needs a service that is under load: tests/cli/test_up.py",
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
FEW_TOKENS = ("--set", "traffic.tokens_in=8", "--set", "traffic.tokens_out=8")
NAMES = {
    "RUN": "quiet-otter",
    "[RUN]": "quiet-otter",
    "TEXT": "book.txt",
    "$RUN": "quiet-otter",
    "runs/quiet-otter/export/200": "model",
}


RUN_WORDS = ["|".join(words.split()) for words in (ADJECTIVES, ANIMALS)]
LONGEST_S = {"train": 300, "profile": 300, "up": 300, "report": 200, "load": 200, "serve": 200}
"""seconds after which a command is killed, on two busy cores; 150 for all others"""
REPORT = ROOT / "build" / "documented_commands.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with workspace(tmp_path_factory.mktemp("docs")) as made:
        yield made


@pytest.fixture
def place(made: Workspace, tmp_path: Path) -> Workspace:
    return made.copied(tmp_path / "docs")


@pytest.fixture(scope="module")
def rows() -> Iterator[list[tuple[str, ...]]]:
    """(page, command, what became of it): a table that is written when the last page is done."""
    rows: list[tuple[str, ...]] = []
    yield rows
    REPORT.parent.mkdir(exist_ok=True)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    REPORT.write_text("\n".join(["| page | command | here |", "|---|---|---|", *lines]) + "\n")


def reason(line: str) -> str:
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, line)), "")


def named_runs(page: Path) -> dict[str, str]:
    """Runs that a page names as they were named when it was written, in their order -> the two that exist here."""
    words = dict.fromkeys(word for line in commands(page) for word in words_of(line))
    named = [word for word in words if re.fullmatch(rf"({RUN_WORDS[0]})-({RUN_WORDS[1]})", word)]
    return dict(zip(named, ("quiet-otter", "bold-heron"), strict=False))


def adapted(words: list[str], place: Workspace) -> list[str]:
    """The same command with what exists here: names, addresses, and sizes that take seconds."""
    server_run = {"$SERVED": place.served, "RUN": place.served if words[0] == "simulate" else NAMES["RUN"]}
    words = [(NAMES | server_run).get(word, word) for word in words]
    words = [re.sub(r"http://127\.0\.0\.1:\d+", place.url, word) for word in words]
    verb = words[0]
    if verb == "load":
        words = [word for i, word in enumerate(words) if "--duration" not in (word, words[i - 1])] + ["--duration", "2"]
        words += [] if any("tokens_in" in word for word in words) else list(FEW_TOKENS)
    if verb == "train" and any(word.startswith(("recipes/", "RECIPE")) for word in words):
        words += [part for each in SMALL for part in ("--set", each)]
    if verb in ("serve", "web", "gateway", "up") and words[1:2] != ["keys"]:
        words = [word for i, word in enumerate(words) if "--port" not in (word, words[i - 1]) and word != "--open"]
        words += ["--port", "0", *(["--device", "cpu"] if verb == "serve" and not words[1].endswith(".pt2") else [])]
    return words


def ran(words: list[str], place: Workspace) -> tuple[int, str]:
    longest_s = LONGEST_S.get(words[0], 150)
    if words[0] == "serve":
        return place.serves(words, "ready on http", timeout_s=longest_s)
    if words[0] in ("web", "up") or (words[0] == "gateway" and words[1] != "keys"):
        return place.serves(words, "http://127.0.0.1", timeout_s=longest_s)
    return place.run(words, timeout_s=longest_s)


def path_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands(), ids=path_of)
def test_the_commands_of_a_page_run(page: Path, place: Workspace, rows: list[tuple[str, ...]]) -> None:
    failed, count, named = {}, 0, named_runs(page)
    for line in dict.fromkeys(commands(page)):
        words = [named.get(word, word) for word in words_of(line)]
        if why := reason(" ".join(words)):
            rows.append((path_of(page), line, f"only parsed: {why}"))
            continue
        count += 1
        begin = time.monotonic()
        code, printed = ran(adapted(words, place), place)
        seconds = f"{time.monotonic() - begin:.1f} s"
        verdict = words[0] == "eval" and "--against" in words and code == 1  # worse than the other is an answer
        if (code and not verdict) or not printed.strip():
            failed[line] = (code, seconds, printed[-600:])
        rows.append((path_of(page), line, f"**failed**, {seconds}" if line in failed else f"ran, {seconds}"))
    assert failed == {}
    if not count:
        pytest.skip("nothing on this page can be run here")


def test_what_is_left_out_is_still_there() -> None:
    """A reason whose command has gone goes as well; and most commands are run."""
    lines = [" ".join(words_of(line)) for page in pages_with_commands() for line in commands(page)]
    assert [pattern for pattern in LEFT_OUT if not any(re.search(pattern, line) for line in lines)] == []
    assert sum(not reason(line) for line in lines) > 0.7 * len(lines)
