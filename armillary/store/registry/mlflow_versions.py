"""Models of an MLflow registry, in and out: a version there becomes a folder here, a release becomes a version there.

Which server that is says MLflow's own MLFLOW_TRACKING_URI, and MLFLOW_REGISTRY_URI where it differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, BadModel, MissingPart, NotFound, missing, one_line
from armillary.store.registry.release import Release

PREFIX = "mlflow:"
_EXPERIMENT = "armillary"
_DIGEST = "armillary.digest"
_MOST_TAG = 5000


@dataclass(frozen=True, kw_only=True)
class MlflowVersion:
    """A version in MLflow, and its files in a local folder."""

    name: str
    version: str
    run: str  # id of its run in MLflow; empty: none
    folder: Path
    note: str = ""


def download(text: str, folder: Path) -> MlflowVersion:
    """Fetch `mlflow:NAME/VERSION` or `mlflow:NAME@ALIAS` into a new folder."""
    name, version, alias = _parse(text)
    client = _client()
    with _plain_errors(text):
        model = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, version)
        address = client.get_model_version_download_uri(name, model.version)
        from mlflow.artifacts import download_artifacts

        folder.mkdir(parents=True, exist_ok=True)
        files = Path(download_artifacts(artifact_uri=address, dst_path=str(folder)))
    return MlflowVersion(
        name=name,
        version=str(model.version),
        run=model.run_id or "",
        folder=_model_folder(files, text),
        note=model.description or "",
    )


def upload(release: Release, folder: Path, name: str) -> str:
    """Store a release as the next version of `name` in MLflow; its NAME/VERSION. The same release again is the same
    version."""
    if not name or any(character in name for character in "/:@'"):
        raise BadInput(f"'{name}' is no name of a model in MLflow; write it like --to mlflow:bot")
    client = _client()
    with _plain_errors(name):
        versions = _registered(client, name)
        same = next((each for each in versions if each.tags.get(_DIGEST) == release.digest), None)
        if same is None:
            same = _new_version(client, release, folder, name)
    return f"{name}/{same.version}"


def _new_version(client: Any, release: Release, folder: Path, name: str) -> Any:
    """A run with the files and results, and a version that refers to it."""
    manifest = release.manifest
    experiment = client.get_experiment_by_name(_EXPERIMENT)
    number = experiment.experiment_id if experiment else client.create_experiment(_EXPERIMENT)
    run = client.create_run(number, run_name=release.text, tags={"armillary.run": manifest.run}).info
    client.log_artifacts(run.run_id, str(folder), "model")
    for metric, value in manifest.evals.items():
        client.log_metric(run.run_id, metric, value)
    client.set_terminated(run.run_id)
    tags = {_DIGEST: release.digest, "armillary.release": release.text, "licence": manifest.licence}
    return client.create_model_version(
        name,
        source=f"{run.artifact_uri}/model",
        run_id=run.run_id,
        description=manifest.note,
        tags={key: value[:_MOST_TAG] for key, value in tags.items() if value},
    )


def _registered(client: Any, name: str) -> list[Any]:
    """The versions of a model, which is registered where it is not yet."""
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    return list(client.search_model_versions(f"name = '{name}'"))


def _parse(text: str) -> tuple[str, str, str]:
    """(name, version, alias)"""
    name, at, alias = text.removeprefix(PREFIX).partition("@")
    version = ""
    if not at:
        name, _, version = name.rpartition("/")
    if not name or not (alias or version.isdecimal()):
        raise BadInput(f"{text} names no version in MLflow; write it like mlflow:bot/3 or mlflow:bot@champion")
    return name, version, alias


def _model_folder(files: Path, text: str) -> Path:
    """The Hugging Face folder among a version's files: they themselves, or the parts that MLflow's transformers flavour
    keeps apart."""
    if (files / "config.json").is_file():
        return files
    model, tokenizer = files / "model", files / "components" / "tokenizer"
    if not (model / "config.json").is_file():
        raise BadModel(f"{text} has no config.json: it is no Hugging Face model; log one with its folder as artifact")
    for path in sorted(tokenizer.iterdir()) if tokenizer.is_dir() else ():
        if path.is_file() and not (model / path.name).exists():
            shutil.copyfile(path, model / path.name)
    return model


def _client() -> Any:
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError:
        raise missing("mlflow", "a model of an MLflow registry", "tracking") from None
    with _plain_errors("its address"):
        return MlflowClient()


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """MLflow's errors as one line."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        kind = NotFound if error.error_code == "RESOURCE_DOES_NOT_EXIST" else BadInput
        raise kind(f"MLflow says of {what}: {one_line(error, 300)}; check MLFLOW_TRACKING_URI and the name") from None
    except ImportError as error:  # mlflow-skinny without the package of this kind of store
        raise MissingPart(f"MLflow lacks a package for this address: {one_line(error, 200)}; install mlflow") from None
