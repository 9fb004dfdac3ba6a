"""Folders in which the commands of the docs can be run as they stand: runs, models, texts and files by the names that
the pages use, all tiny. One is made, and each page gets a copy, so that no page depends on another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

from tests.docs.commands import ROOT
from tests.fork_server import Command, shared
from tests.services.small_training import RECIPE, write_text

SCRIPT = """import torch
layer = torch.nn.Linear(8, 8)
for _ in range(6):
    layer(torch.ones(2, 8)).sum().backward()
"""
NET = """import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1).sum(1, keepdim=True)
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,8,4\n2023-11-16 18:15:46.9805900,9,3\n"
FILES: dict[str, str | None] = {
    "book.txt": None,
    "mine.txt": None,
    "your_script.py": SCRIPT,
    "train.py": SCRIPT,
    "mypackage/__init__.py": "",
    "mypackage/module.py": SCRIPT.replace("for _", "def function():\n  for _").replace("    layer(", "      layer("),
    "net.py": NET,
    "conv.csv": TRACE,
    "ds_config.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
    "job.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n'
    "seq_len = 2048\nlocal_batch_size = 1\nsteps = 10\n",
    "pretrain.sh": "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --vocab-size 512\n",
    "day.toml": '[model]\npath = "model"\n[hardware]\non = "here"\n[traffic]\nrequests_per_s = 4.0\ntokens_in = 8\n'
    "tokens_out = 8\nduration_s = 10.0\n",
    "results.json": '{"mmlu": 0.5}',
}
MODELS = (
    "MODEL",
    "SMALL_MODEL",
    "HF_FOLDER",
    "model",
    "my-model",
    "models/tiny",
    "Qwen2.5-0.5B-Instruct",
)
"""names of folders that are the export of the first run"""
LOAD = ("--rate", "8", "--duration", "5", "--set", "traffic.tokens_in=8", "--set", "traffic.tokens_out=8")
"""enough requests for a served run to have step times"""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The folder, the user's home with what was measured of this machine, the address of a server of its model, and the
    name of that server's run."""

    folder: Path
    user: Path
    url: str = ""
    served: str = ""

    def copied(self, folder: Path) -> Workspace:
        """Another folder with the same files."""
        shutil.copytree(self.folder, folder, symlinks=True, ignore=shutil.ignore_patterns("logs", ".cache"))
        return replace(self, folder=folder)

    def run(self, words: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """(exit code, what was printed); a command that takes longer is killed, and says so."""
        command, begin = self.start(words), time.monotonic()
        code = command.wait(timeout_s)
        late = f"\nkilled after {timeout_s:.0f} s" if time.monotonic() - begin > timeout_s else ""
        return code, command.out + late

    def serves(self, words: Sequence[str], ready: str, *, timeout_s: float) -> tuple[int, str]:
        """The same of a command that serves until it is told to end."""
        command, end = self.start(words), time.monotonic() + timeout_s
        while ready not in command.out and command.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        was_ready = ready in command.out
        command.terminate()
        code = command.wait(30)
        return (0 if was_ready else code or 1), command.out

    def start(self, words: Sequence[str]) -> Command:
        log = self.folder / "logs" / f"{time.monotonic_ns()}"
        log.parent.mkdir(exist_ok=True)
        env = {"PYTHONPATH": str(self.folder), "HOME": str(self.user)}
        return shared().start([*words], log, cwd=self.folder, err_to_out=True, env=env)


@contextmanager
def workspace(folder: Path) -> Iterator[Workspace]:
    """One with everything that the pages speak of."""
    _write_files(folder)
    here = Workspace(folder=folder, user=folder)
    for name, more in (("quiet-otter", ""), ("bold-heron", "layout.micro_batch=2")):
        _done(here, "train", "mine.toml", "--run", name, *(["--set", more] if more else []))
    export = next(iter(folder.glob("runs/*-quiet-otter/export/20")))
    for name in MODELS:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copytree(export, folder / name)
    for name in ("better", "BETTER"):
        shutil.copytree(next(iter(folder.glob("runs/*-bold-heron/export/20"))), folder / name)
    _done(here, "bench", "ceilings", "--quick", "--only", "launch")
    _done(here, "convert", "armillary-5m", "first", "--random-weights")  # of recipes/service.toml
    _done(here, "quantize", "model", "model-Q4_K_M.gguf", "--to", "gguf", "--text", "mine.txt")
    shutil.copy(ROOT / "tests/profiling/data/alexnet_start.json.gz", folder / "trace.json.gz")
    shutil.copy(ROOT / "tests/diagnosis/data/hf_trainer_eval_often.log", folder / "train.log")
    trained = set(folder.glob("runs/*"))
    server = here.start(["serve", "quiet-otter", "--port", "0", "--device", "cpu"])
    try:
        url = _address(server)
        with urlopen(f"{url}/metrics") as page:
            (folder / "page.txt").write_bytes(page.read())
        _done(here, "load", url, *LOAD)
        (served,) = set(folder.glob("runs/*")) - trained
        yield replace(here, url=url, served=served.name)
    finally:
        server.kill()
        server.wait(30)


def _write_files(folder: Path) -> None:
    write_text(folder / "text")
    words = "\n".join(path.read_text() for path in sorted((folder / "text").iterdir())[:8])
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(words if text is None else text)
    recipe = RECIPE.format(text=folder / "text", steps=20, more="").replace("dp = 2", "dp = 1")
    recipe = recipe.replace("save_every = 0", "save_every = 10\nkeep = 10").replace(
        "profile_every = 0", "profile_every = 8"
    )
    for name in ("mine.toml", "tour.toml", "RECIPE"):
        (folder / name).write_text(recipe)
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def _done(here: Workspace, *words: str) -> None:
    code, printed = here.run(words, timeout_s=240)
    assert code == 0, printed


def _address(server: Command) -> str:
    end = time.monotonic() + 300
    while "ready on http" not in server.out:
        assert server.poll() is None and time.monotonic() < end, server.out
        time.sleep(0.05)
    return server.out.partition("ready on ")[2].split()[0]
