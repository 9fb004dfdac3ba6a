"""The model that a text names: a folder, a GGUF file, a config.json, a catalogue name, a run, a release or a Hub id.

Every verb with a model argument calls `resolve_model`, so that all accept the same names.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from armillary.errors import BadInput, BadModel, NotFound, nearest
from armillary.spec import catalogue
from armillary.spec.hf.config import from_hf
from armillary.spec.model import ModelConfig
from armillary.store import hub
from armillary.store.gguf.local_folder import gguf_folder, is_gguf
from armillary.store.hf_folder import has_weights, read_config, weight_files
from armillary.store.home import Home
from armillary.store.progress import Progress, silent
from armillary.store.registry.open_registry import PREFIX, open_registry, split_address
from armillary.store.registry.release import Release
from armillary.store.remote import is_url
from armillary.store.remote_model import local_files, weights_url
from armillary.store.runs import Run, find_run, is_run_folder, list_runs, run_names

Origin = Literal["catalogue", "folder", "config", "gguf", "hub", "run", "release", "store"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model and its source. `folder` has its weights; `files` has config.json and tokenizer even without them. `url`
    is set where the weights stay in a store."""

    name: str
    config: ModelConfig
    folder: Path | None = None
    files: Path | None = None
    url: str = ""
    origin: Origin
    release: Release | None = None  # of the registry

    @property
    def weights(self) -> str:
        """Where any machine finds the weights; empty without."""
        return self.url or str(self.folder or "")


def resolve_model(
    text: str,
    home: Home,
    *,
    need_weights: bool,
    fetch_progress: Progress | None = None,
    endpoint: str | None = None,
    trusted_keys: str = "",
) -> ModelSource:
    """The model that `text` names; BadModel where `need_weights` and it has none. With a file of `trusted_keys`, a
    release must be signed by one of them."""
    if not text.strip():
        raise BadInput("no model given; name a catalogue model, a folder, a run or a hub id (owner/name)")
    path = Path(os.path.expanduser(text))
    if text.startswith(PREFIX):
        release = _from_release(text, home, need_weights, fetch_progress, trusted_keys)
        assert release is not None, "a release that is not there is an error"
        return release
    if is_url(text):
        return _from_store(text, home)
    source = (
        _from_path(path, home, need_weights)
        or _from_catalogue(text, need_weights)
        or _from_run(text, home, need_weights)
        or _from_release(text, home, need_weights, fetch_progress, trusted_keys)
    )
    if source is not None:
        return source
    _refuse_path(text, path)
    source = _from_hub(text, need_weights, fetch_progress, endpoint)
    if source is None:
        raise _no_model(text, home)
    return source


# --- one function per kind; None where `text` is not of that kind


def _from_store(url: str, home: Home) -> ModelSource:
    folder = local_files(url, home)
    name = url.rstrip("/").rpartition("/")[2]
    config = from_hf(read_config(folder), name=name)
    return ModelSource(name=name, config=config, folder=folder, files=folder, url=weights_url(folder), origin="store")


def _from_path(path: Path, home: Home, need_weights: bool) -> ModelSource | None:
    if is_gguf(path):
        folder = gguf_folder(path, home)
        config = from_hf(read_config(folder), name=path.stem)
        return ModelSource(name=path.stem, config=config, folder=folder, files=folder, origin="gguf")
    if os.path.isfile(path):
        return _from_config(path, need_weights)
    if os.path.isfile(path / "config.json"):
        return _from_folder(path.absolute(), path.absolute().name, "folder", need_weights)
    return None


def _from_config(path: Path, need_weights: bool) -> ModelSource:
    if path.suffix != ".json":
        raise BadInput(f"{path} is not a model; give its folder or its config.json")
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    config = from_hf(read_config(path), name=name)
    if need_weights:
        raise BadModel(f"{path} is a shape without weights; give the folder with its weights, or add --random-weights")
    return ModelSource(name=name, config=config, origin="config")


def _from_catalogue(text: str, need_weights: bool) -> ModelSource | None:
    try:
        entry = catalogue.model(text)
    except NotFound:
        return None
    name = entry.config.name
    if need_weights:
        example = f" ({entry.hub})" if entry.hub else ""
        raise BadModel(
            f"{name} is a catalogue shape without weights; "
            f"give a Hugging Face folder or hub id{example}, or add --random-weights"
        )
    return ModelSource(name=name, config=entry.config, origin="catalogue")


def _from_run(text: str, home: Home, need_weights: bool) -> ModelSource | None:
    runs = list_runs(home)
    if text not in run_names(runs) and not is_run_folder(Path(os.path.expanduser(text))):
        return None
    run = find_run(home, text)
    folder = run.latest_export()
    if folder is None:
        export = f"armillary checkpoints export {run.name}, " if run.checkpoint_steps() else ""
        raise NotFound(
            f"run {run.name} has exported no model yet ({_progress(run)}); {export}let it go on, or name another"
        )
    return _from_folder(folder, run.name, "run", need_weights)


def _progress(run: Run) -> str:
    state = run.state
    return f"{state.state} at step {state.step_text(' of ')}"


def _from_release(
    text: str, home: Home, need_weights: bool, progress: Progress | None, keys: str
) -> ModelSource | None:
    url, reference = split_address(text) if text.startswith(PREFIX) else ("", text)
    registry = open_registry(home, url, keys)
    if not text.startswith(PREFIX) and not registry.versions(text.partition("@")[0].partition(":")[0]):
        return None
    release = registry.resolve(reference)
    folder = registry.load(release, progress or silent)
    return release_source(release, folder, need_weights=need_weights)


def release_source(release: Release, folder: Path, *, need_weights: bool) -> ModelSource:
    """A release whose files are in `folder`."""
    return replace(_from_folder(folder, release.text, "release", need_weights), release=release)


def _from_hub(text: str, need_weights: bool, progress: Progress | None, endpoint: str | None) -> ModelSource | None:
    split = hub.split_id(text)
    if split is None:
        return None
    name, revision = split
    folder = hub.fetch(name, revision=revision, weights=need_weights, progress=progress or silent, endpoint=endpoint)
    return _from_folder(folder, name, "hub", need_weights)


def _from_folder(folder: Path, name: str, origin: Origin, need_weights: bool) -> ModelSource:
    config = from_hf(read_config(folder), name=name)
    if need_weights:
        weight_files(folder)
    return ModelSource(
        name=name, config=config, folder=folder if has_weights(folder) else None, files=folder, origin=origin
    )


# --- nothing found


def _refuse_path(text: str, path: Path) -> None:
    """An error for a path that exists but is no model, or that looks like a path and does not exist."""
    if os.path.isdir(path):
        raise BadModel(f"{text} has no config.json; give a Hugging Face model folder or a config.json")
    if text.startswith(("/", "./", "../", "~")) or text.endswith(("/", ".json")) or text.count("/") > 1:
        kind = "file" if text.endswith(".json") else "folder"
        raise NotFound(f"no {kind} {text}; {_next_step(text)}")


def _next_step(text: str) -> str:
    """The command that creates a run's export folder; for another path, the accepted kinds of names."""
    parts = Path(text).parts
    run = next(
        (
            name
            for runs, name, export in zip(parts, parts[1:], parts[2:], strict=False)
            if runs == "runs" and export == "export"
        ),
        None,
    )
    if run is None:
        return "give a Hugging Face folder, a config.json, a hub id or a catalogue name"
    return f"make it with armillary train recipes/tour.toml --run {run}, or another model with --set model.path=PATH"


def _no_model(text: str, home: Home) -> NotFound:
    models = catalogue.models()
    names = [*models, *(alias for entry in models.values() for alias in entry.aliases)]
    guess = nearest(text, [*names, *run_names(list_runs(home)), *open_registry(home).names()])
    hint = f"did you mean {guess}?" if guess else "give a catalogue name, a folder, a run or a hub id (owner/name)"
    return NotFound(f"no model '{text}'; {hint} (armillary models lists {len(models)})")
