"""Everything a person may type for a model, and every way it can be wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError, BadInput, BadModel, NotFound
from armillary.spec import catalogue
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from armillary.store.resolve_model import ModelSource, resolve_model
from armillary.store.runs import create_run
from tests.store.conftest import write_model
from tests.store.stand_in_hub import StandInHub


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shape(text: str, home: Home) -> ModelSource:
    return resolve_model(text, home, need_weights=False)


def weights(text: str, home: Home) -> ModelSource:
    return resolve_model(text, home, need_weights=True)


# --- every route


@pytest.mark.parametrize("text", ["tiny", "./tiny", "tiny/"])
def test_a_folder(home: Home, model_folder: Path, text: str) -> None:
    source = weights(text, home)
    assert (source.name, source.origin, source.folder) == ("tiny", "folder", model_folder)
    assert source.files == source.folder
    assert (source.config.hidden, source.config.num_layers, source.config.name) == (64, 2, "tiny")


def test_the_folder_one_stands_in(home: Home, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_folder)
    assert weights(".", home).name == "tiny"


def test_a_folder_without_weights_is_enough_for_its_shape(home: Home, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bare", weights=False)
    source = shape(str(folder), home)
    assert (source.folder, source.files, source.config.hidden) == (None, folder, 64)


def test_a_bare_config(home: Home, model_folder: Path, tmp_path: Path) -> None:
    source = shape(str(model_folder / "config.json"), home)
    assert (source.name, source.origin, source.folder, source.files) == ("tiny", "config", None, None)
    (model_folder / "config.json").rename(tmp_path / "mine.json")
    assert shape("mine.json", home).name == "mine"


def test_a_catalogue_name_and_its_aliases(home: Home) -> None:
    name, entry = next((name, entry) for name, entry in catalogue.models().items() if entry.aliases)
    for text in (name, name.upper(), *entry.aliases):
        assert shape(text, home) == ModelSource(name=name, config=entry.config, origin="catalogue")


def test_a_runs_latest_export(home: Home) -> None:
    run = create_run(home, {})
    for step in (50, 100):
        write_model(run.export(step))
    for text in (run.name, run.id, str(run.folder)):
        source = weights(text, home)
        assert (source.name, source.origin, source.folder) == (run.name, "run", run.export(100))


def test_a_release_by_name_version_and_alias(home: Home, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "other" / "model")
    registry = open_registry(home)
    for note in ("first", "second"):
        registry.push("support-bot", folder, note=note)
    registry.promote("support-bot:1", "production")
    versions = {text: weights(text, home).name for text in ("support-bot", "support-bot:1", "support-bot@production")}
    assert list(versions.values()) == ["support-bot:2", "support-bot:1", "support-bot:1"]
    assert weights("support-bot", home).origin == "release"


def test_a_hub_id(home: Home, hub: StandInHub, model_folder: Path) -> None:
    hub.add("acme/tiny", {path.name: path.read_bytes() for path in model_folder.iterdir()})
    source = resolve_model("acme/tiny", home, need_weights=True, endpoint=hub.endpoint)
    assert (source.name, source.origin, source.config.hidden) == ("acme/tiny", "hub", 64)
    assert source.folder is not None and (source.folder / "model.safetensors").read_bytes() == b"weights"


def test_a_hub_id_for_its_shape_fetches_no_weights(home: Home, hub: StandInHub, model_folder: Path) -> None:
    hub.add("acme/tiny", {path.name: path.read_bytes() for path in model_folder.iterdir()}, ref="v2")
    source = resolve_model("acme/tiny@v2", home, need_weights=False, endpoint=hub.endpoint)
    assert source.folder is None and source.files is not None
    assert hub.downloads() == {"config.json", "tokenizer.json"}


# --- which comes first


def test_a_folder_comes_before_a_catalogue_name(home: Home, tmp_path: Path) -> None:
    name = next(iter(catalogue.models()))
    (tmp_path / name).mkdir()
    assert shape(name, home).origin == "catalogue", "a folder that is no model does not stand in the way"
    (tmp_path / name).rmdir()
    write_model(tmp_path / name)
    assert shape(name, home).origin == "folder"


def test_a_folder_comes_before_the_hub(home: Home, tmp_path: Path) -> None:
    write_model(tmp_path / "acme" / "tiny")
    assert weights("acme/tiny", home).origin == "folder"


# --- every refusal, in one line that ends with the next step


def refusal(text: str, home: Home, kind: type[ArmillaryError], need_weights: bool = True) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(text, home, need_weights=need_weights, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_catalogue_name_has_no_weights(home: Home) -> None:
    name, entry = next((name, entry) for name, entry in catalogue.models().items() if entry.hub)
    assert refusal(name, home, BadModel) == (
        f"{name} is a catalogue shape without weights; give a Hugging Face folder or hub id ({entry.hub}), "
        "or add --random-weights"
    )


def test_a_bare_config_has_no_weights(home: Home, model_folder: Path) -> None:
    assert refusal("tiny/config.json", home, BadModel) == (
        "tiny/config.json is a shape without weights; give the folder with its weights, or add --random-weights"
    )


def test_a_folder_without_weights(home: Home, tmp_path: Path) -> None:
    write_model(tmp_path / "bare", weights=False)
    assert "has no weights (*.safetensors); give a folder that has" in refusal("bare", home, BadModel)
    (tmp_path / "bare" / "pytorch_model.bin").write_bytes(b"")
    assert "only pickled weights (pytorch_model.bin)" in refusal("bare", home, BadModel)


def test_folders_that_are_missing_or_no_models(home: Home, tmp_path: Path) -> None:
    next_step = "give a Hugging Face folder, a config.json, a hub id or a catalogue name"
    for text in ("./nowhere", "/nowhere/at/all", "nowhere/", "a/b/c"):
        assert refusal(text, home, NotFound) == f"no folder {text}; {next_step}"
    assert refusal("nowhere.json", home, NotFound) == f"no file nowhere.json; {next_step}"
    assert refusal("runs/mine/export/200", home, NotFound) == (
        "no folder runs/mine/export/200; make it with armillary train recipes/tour.toml --run mine, "
        "or another model with --set model.path=PATH"
    )
    (tmp_path / "acme" / "empty").mkdir(parents=True)
    assert refusal("acme/empty", home, BadModel).startswith("acme/empty has no config.json; give a Hugging Face model")


def test_configs_that_are_broken(home: Home, model_folder: Path) -> None:
    (model_folder / "config.json").write_text('{"model_type": ')
    assert "config.json is not JSON" in refusal("tiny", home, BadModel)
    (model_folder / "config.json").write_text('{"model_type": "lama"}')
    assert "did you mean llama?" in refusal("tiny", home, BadModel)


def test_a_file_that_is_no_config(home: Home, model_folder: Path) -> None:
    assert refusal("tiny/model.safetensors", home, BadInput) == (
        "tiny/model.safetensors is not a model; give its folder or its config.json"
    )


def test_a_run_without_an_export(home: Home) -> None:
    run = create_run(home, {}, steps=200)
    run.update(step=20)
    assert refusal(run.name, home, NotFound) == (
        f"run {run.name} has exported no model yet (running at step 20 of 200); let it go on, or name another"
    )
    (run.folder / "checkpoints" / "10").mkdir(parents=True)
    (run.folder / "checkpoints" / "10" / "manifest.json").write_text("{}")
    assert f"; armillary checkpoints export {run.name}, let it go on" in refusal(run.name, home, NotFound)


def test_a_release_that_has_no_such_version(home: Home, model_folder: Path) -> None:
    open_registry(home).push("support-bot", model_folder)
    assert refusal("support-bot:3", home, NotFound) == "no version 3 of support-bot; it has 1"


def test_names_that_are_nearly_right(home: Home, model_folder: Path) -> None:
    name, lists = next(iter(catalogue.models())), len(catalogue.models())
    assert refusal(name + "x", home, NotFound) == (
        f"no model '{name}x'; did you mean {name}? (armillary models lists {lists})"
    )
    run = create_run(home, {})
    assert f"did you mean {run.name}?" in refusal(run.name + "x", home, NotFound)
    open_registry(home).push("zebra-bot", model_folder)
    assert "did you mean zebra-bot?" in refusal("zebrabot", home, NotFound)


def test_names_that_are_nothing(home: Home) -> None:
    for text in ("???", "x" * 5000, "a b", "no-such-thing-at-all"):
        assert refusal(text, home, NotFound).startswith(f"no model '{text}'; give a catalogue name, a folder, a run or")
    assert refusal(" ", home, BadInput).startswith("no model given; name a catalogue model")
    assert refusal("~nobody/model", home, NotFound).startswith("no folder ~nobody/model; give a Hugging Face folder")


def test_the_hub_out_of_reach(home: Home, hub: StandInHub) -> None:
    hub.stop()
    assert "cannot reach http://127.0.0.1:9 and acme/tiny" in refusal("acme/tiny", home, NotFound)


def test_no_part_of_the_store_imports_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, armillary.store as s\n"
        "for m in pkgutil.iter_modules(s.__path__): importlib.import_module('armillary.store.' + m.name)\n"
        "print(sorted({'torch', 'numpy', 'huggingface_hub', 'tqdm', 'rich'} & set(sys.modules)))"
    )
    root = Path(catalogue.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
