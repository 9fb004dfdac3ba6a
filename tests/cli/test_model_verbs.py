"""data prepare, train, generate and convert through the command line: human, json and quiet, and what goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.model.weights.hf_weights import load_model
from armillary.store.home import Home
from tests.conftest import Ran
from tests.serving.tiny import make_folder

Cli = Callable[..., Ran]
RECIPE = """
[model]
name = "armillary-2m"
num_layers = 1
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
ffn = 64
vocab = 320
context = 128

[data]
source = "{source}"
held_out = 0.1

[layout]
precision = "fp32"

[train]
sequence = 32
batch_tokens = 128
steps = 6
eval_every = 3
"""


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"line one of {i}\nthe quick brown fox number {i} jumps\n" * 6)
    return folder


def write_recipe(path: Path, text: Path) -> Path:
    path.write_text(RECIPE.format(source=text))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def recipe(text: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "small.toml", text)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with the run `small`, which has an export."""
    folder = tmp_path_factory.mktemp("trained")
    home, recipe = Home.at(folder / "home"), write_recipe(folder / "small.toml", write_text(folder / "text"))
    assert main(["train", str(recipe), "--run", "small", "--home", str(home.work), "--quiet"]) == 0
    return home


@pytest.fixture
def trained(trained_once: Home, home: Home) -> str:
    """The name of that run, in a copy of that home."""
    shutil.copytree(trained_once.work, home.work, dirs_exist_ok=True)
    return "small"


def test_data_prepare(cli: Cli, text: Path, home: Home) -> None:
    ran = cli("data", "prepare", str(text), "--tokenizer", "300", "--json")
    assert ran.code == 0 and ran.json["documents"] == 30 and ran.json["vocab"] <= 300
    assert Path(ran.json["folder"]).parent == home.data
    again = cli("data", "prepare", str(text), "--tokenizer", "300")
    assert "already there" in again.out and "30 documents" in again.out
    assert cli("data", "prepare", str(text), "--tokenizer", "300", "--quiet").out.strip() == ran.json["folder"]


def test_train_says_what_it_does_and_exports(cli: Cli, recipe: Path) -> None:
    ran = cli("train", str(recipe))
    assert ran.code == 0, ran.err
    for said in (
        "from scratch",
        "6 steps of 128 tokens",
        "finished after 6 steps",
        "held-out loss",
        "exported",
        "next: ",
    ):
        assert said in ran.out
    listed = cli("runs", "--json").json
    assert len(listed) == 1 and listed[0]["state"] == "finished" and listed[0]["step"] == 6


def test_train_dry_run_writes_nothing(cli: Cli, recipe: Path, home: Home) -> None:
    ran = cli("train", str(recipe), "--dry-run", "--json")
    assert ran.code == 0 and ran.json["plan"]["train"]["steps"] == 6
    assert not home.runs.exists() and not home.data.exists()


def test_train_takes_overrides(cli: Cli, recipe: Path) -> None:
    assert cli("train", str(recipe), "--set", "train.steps=2", "--json").json["steps"] == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("layout.tp=3", "tp=3 does not divide 2 KV heads of armillary-2m; try --set layout.tp=2"),
        ("train.stepz=3", "did you mean steps"),
        ("model.name=armillary-2n", "did you mean armillary-2m"),
        ("train.lr=fast", "train.lr"),
        ("nonsense", "write it like --set"),
        ("data.source=/nowhere/at/all.txt", "/nowhere/at/all.txt"),
    ],
)
def test_a_recipe_that_cannot_run_is_one_line_and_code_2(
    change: str, expected: str, cli: Cli, recipe: Path, home: Home
) -> None:
    ran = cli("train", str(recipe), "--set", change)
    assert ran.code == 2 and ran.err.startswith("error: ") and expected in ran.err
    assert ran.err.count("\n") == 1
    assert not home.runs.exists()


def test_generate_from_a_run(cli: Cli, trained: str) -> None:
    human = cli("generate", trained, "the quick", "--max-tokens", "5", "--seed", "3")
    assert human.code == 0 and human.out.startswith("the quick") and "tokens/s" in human.out
    machine = cli("generate", trained, "the quick", "--max-tokens", "5", "--seed", "3", "--json").json
    assert len(machine["tokens"]) <= 5 and machine["text"] in human.out
    quiet = cli("generate", trained, "the quick", "--max-tokens", "5", "--seed", "3", "--quiet")
    assert quiet.out.rstrip("\n") == machine["text"].rstrip("\n")
    assert cli("generate", trained, "hello", "--chat", "--max-tokens", "3").code == 0


def test_generate_draws_as_the_model_says_where_no_flag_does(cli: Cli, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    line = ("generate", str(folder), "def main", "--max-tokens", "12", "--device", "cpu")
    (folder / "generation_config.json").write_text('{"temperature": 1.5, "top_p": 1e-6}')
    own, greedy, other = cli(*line), cli(*line, "--temperature", "0", "--json"), cli(*line, "--top-p", "1", "--json")
    assert "sampling defaults, where no flag says otherwise: temperature 1.5, top_p 1e-06" in own.out
    assert cli(*line, "--json").json["tokens"] == greedy.json["tokens"] != other.json["tokens"]


def test_generate_penalises_repetitions_as_the_model_says(cli: Cli, tmp_path: Path) -> None:
    """Greedily, so that the engine and its slow twin must agree."""
    from armillary.engine.request.sampling_params import default_sampling
    from tests.model.plain_generation import plain_completions

    folder = make_folder(tmp_path)
    line = ("generate", str(folder), "def main", "--max-tokens=40", "--temperature=0", "--device=cpu", "--json")
    plain = cli(*line).json["tokens"]
    (folder / "generation_config.json").write_text('{"repetition_penalty": 5.0, "min_p": 0.1, "temperature": 0}')
    penalised, sampling = cli(*line).json["tokens"], default_sampling(folder)
    assert penalised != plain and len(set(penalised)) >= len(set(plain))
    ((tokens, _, _),) = plain_completions(folder, ["def main"], replace(sampling, max_tokens=40))
    assert sampling.min_p == 0.1 and tokens == penalised


def test_generate_from_a_shape_takes_token_ids(cli: Cli) -> None:
    line = ("generate", "armillary-2m", "1 15 7", "--random-weights", "--max-tokens", "4", "--json")
    assert len(cli(*line).json["tokens"]) == 4
    ran = cli("generate", "armillary-2m", "hello", "--random-weights")
    assert ran.code == 2 and "has no tokenizer; give the prompt as token ids" in ran.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("generate", "armillary-2m", "hi"), "--random-weights"),
        (("generate", "armillary-3m", "hi"), "did you mean armillary-"),
        (("generate", "RUN", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "RUN", "hi", "--max-tokens", "1000"), "exceed the context of 128"),
        (("generate", "RUN", "hi", "--dtype", "fp7"), "dtype 'fp7' is not known"),
        (("generate", "RUN", "hi", "--device", "cuda:77"), "no cuda:77 on this machine"),
        (("generate", "RUN", "hi", "--device", "gpuu"), "device 'gpuu' is not known"),
        (("convert", "RUN", "OUT", "--dtype", "int3"), "dtype 'int3' is not known"),
        (("convert", "gpt2", "OUT"), "--random-weights"),
        (("convert", "gpt2", "OUT", "--random-weights"), "is not supported"),
        (("convert", "deepseek-v3", "OUT", "--random-weights"), "a smaller model or a larger machine"),
    ],
)
def test_wrong_lines(line: tuple[str, ...], expected: str, cli: Cli, trained: str, tmp_path: Path) -> None:
    named = {"RUN": trained, "OUT": str(tmp_path / "out")}
    ran = cli(*[named.get(word, word) for word in line])
    errors = [line for line in ran.err.splitlines() if not line.startswith("warning: dtype ")]  # what a CPU is quick in
    assert ran.code == 2 and len(errors) == 1 and expected in errors[0], ran.err
    assert not (tmp_path / "out").exists()


def test_convert_changes_dtype_and_keeps_the_tokenizer(cli: Cli, trained: str, tmp_path: Path) -> None:
    target = tmp_path / "half"
    ran = cli("convert", trained, str(target), "--dtype", "bf16", "--json")
    assert ran.code == 0 and ran.json["bytes"] > 2 * ran.json["parameters"]
    assert str(next(load_model(target).parameters()).dtype) == "torch.bfloat16"
    assert (target / "tokenizer.json").is_file()
    again = cli("convert", trained, str(target))
    assert again.code == 2 and "half" in again.err
    assert cli("convert", trained, str(target), "--overwrite").code == 0


def test_convert_makes_weights_for_a_shape(cli: Cli, tmp_path: Path) -> None:
    ran = cli("convert", "armillary-2m", str(tmp_path / "m"), "--random-weights", "--shard-size", "1MB", "--json")
    assert ran.code == 0
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert cli("models", str(tmp_path / "m"), "--json").json["parameters"] == ran.json["parameters"]
