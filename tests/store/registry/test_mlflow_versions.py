"""Releases to and from a stand-in of MLflow that keeps files and versions as its client does; with `make peers`, MLflow
itself."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from armillary.errors import BadInput, BadModel, MissingPart, NotFound
from armillary.store.home import Home
from armillary.store.registry.mlflow_versions import _parse, download, upload
from armillary.store.registry.open_registry import open_registry
from tests.store.conftest import write_model


class MlflowException(Exception):
    """As MLflow raises it."""

    error_code = "RESOURCE_DOES_NOT_EXIST"


@dataclass
class FakeClient:
    """The part of MlflowClient that is used, over a folder."""

    folder: Path
    versions: dict[tuple[str, str], Any] = field(default_factory=dict)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)

    def get_model_version(self, name: str, version: str) -> Any:
        if (name, version) not in self.versions:
            raise MlflowException(f"Model Version (name={name}, version={version})\nnot found")
        return self.versions[name, version]

    def get_model_version_by_alias(self, name: str, alias: str) -> Any:
        return self.get_model_version(name, self.aliases.get((name, alias), "0"))

    def get_model_version_download_uri(self, name: str, version: str) -> str:
        return str(self.versions[name, str(version)].source)

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="run-1", artifact_uri=str(self.folder / "run-1")))

    def log_artifacts(self, run: str, folder: str, path: str) -> None:
        shutil.copytree(folder, self.folder / run / path)

    def log_metric(self, run: str, name: str, value: float) -> None:
        self.metrics[name] = value

    def set_terminated(self, run: str) -> None:
        pass

    def search_registered_models(self, text: str) -> list[str]:
        return [name for name in self.names if text == f"name = '{name}'"]

    def create_registered_model(self, name: str) -> None:
        self.names.add(name)

    def search_model_versions(self, text: str) -> list[Any]:
        return [each for (name, _), each in self.versions.items() if text == f"name = '{name}'"]

    def create_model_version(self, name: str, **fields: Any) -> Any:
        number = str(1 + sum(key[0] == name for key in self.versions))
        self.versions[name, number] = SimpleNamespace(version=int(number), **fields)
        return self.versions[name, number]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient(tmp_path / "mlruns")
    modules = {name: ModuleType(f"mlflow{name}") for name in ("", ".tracking", ".artifacts", ".exceptions")}

    def fetch(artifact_uri: str, dst_path: str) -> str:
        return str(shutil.copytree(artifact_uri, Path(dst_path) / Path(artifact_uri).name))

    modules[".tracking"].MlflowClient = lambda: client  # type: ignore[attr-defined]
    modules[".artifacts"].download_artifacts = fetch  # type: ignore[attr-defined]
    modules[".exceptions"].MlflowException = MlflowException  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"mlflow{name}", module)
    return client


def there_and_back(tmp_path: Path) -> None:
    """A release goes to MLflow once, however often it is sent, and comes back with the same files."""
    registry, folder = open_registry(Home.at(tmp_path / "home")), write_model(tmp_path / "model")
    first = registry.push("bot", folder, note="first", evals={"mmlu": 0.5})
    assert [upload(first, folder, "shared") for _ in range(2)] == ["shared/1", "shared/1"]
    fetched = download("mlflow:shared/1", tmp_path / "fetched")
    back = registry.push("copy", fetched.folder)
    assert back.manifest.files == first.manifest.files
    assert fetched.note == "first" and fetched.run


def test_a_release_goes_to_mlflow_and_comes_back(mlflow: FakeClient, tmp_path: Path) -> None:
    there_and_back(tmp_path)
    (version,) = mlflow.versions.values()
    assert version.tags["armillary.release"] == "bot:1" and mlflow.metrics == {"mmlu": 0.5}
    mlflow.aliases["shared", "champion"] = "1"
    assert download("mlflow:shared@champion", tmp_path / "again").version == "1"
    with pytest.raises(NotFound, match=r"^MLflow says of mlflow:shared/7: .* not found; check") as raised:
        download("mlflow:shared/7", tmp_path / "none")
    assert "\n" not in str(raised.value)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    there_and_back(tmp_path)


def test_as_a_user_types_it(cli: Callable[..., Any], mlflow: FakeClient, tmp_path: Path) -> None:
    assert cli("registry", "push", str(write_model(tmp_path / "model")), "bot", "--note", "first").code == 0
    sent = cli("registry", "pull", "bot:1", "--to", "mlflow:shared", "--json")
    assert sent.code == 0 and sent.json["mlflow"] == "shared/1", sent.err
    back = cli("registry", "push", "mlflow:shared/1", "copy", "--json").json
    assert (back["release"], back["note"], back["run"]) == ("copy:1", "first", "mlflow:run-1")


def test_the_parts_of_the_transformers_flavour_are_joined(mlflow: FakeClient, tmp_path: Path) -> None:
    logged = write_model(tmp_path / "logged" / "model").parent
    (logged / "model" / "tokenizer.json").unlink()
    (logged / "components" / "tokenizer").mkdir(parents=True)
    (logged / "components" / "tokenizer" / "tokenizer.json").write_text("{}")
    mlflow.create_model_version("bot", source=str(logged), run_id=None, description=None)
    fetched = download("mlflow:bot/1", tmp_path / "here")
    assert {path.name for path in fetched.folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    (logged / "model" / "config.json").unlink()
    with pytest.raises(BadModel, match=r"no config\.json"):
        download("mlflow:bot/1", tmp_path / "there")


@pytest.mark.parametrize("text", ["mlflow:", "mlflow:bot", "mlflow:bot/x", "mlflow:@champion", "mlflow:/3"])
def test_what_names_no_version(text: str) -> None:
    with pytest.raises(BadInput, match="write it like"):
        _parse(text)


def test_names_and_a_missing_mlflow(mlflow: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = open_registry(Home.at(tmp_path)).push("bot", write_model(tmp_path / "model"))
    with pytest.raises(BadInput, match="no name of a model"):
        upload(release, tmp_path / "model", "a/b")
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingPart, match=r"armillary\[tracking\]"):
        download("mlflow:bot/1", tmp_path / "y")
