"""`armillary registry`: releases of models, and the aliases that point at them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import VerbGroup
from armillary.errors import BadInput, NotFound
from armillary.spec.toml.fields import to_plain
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from armillary.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from armillary.store.registry.release import Release

registry = VerbGroup("registry", help="Versions of models that never change, and aliases that move between them.")

where_option = click.option(
    "--registry", "url", default="", metavar="URL", help="s3://…, gs://…, a folder.  [default: registry in the home]"
)
keys_option = click.option(
    "--trusted-keys", "keys", default="", metavar="FILE", help="Public keys; load only what one of them signed."
)
release_argument = click.argument("release")


@registry.verb
@click.argument("source", shell_complete=completion.runs)
@click.argument("name")
@click.option("--alias", help="Promote it to this alias at once.")
@click.option("--eval", "evals", multiple=True, metavar="NAME=VALUE", help="A result, or a JSON file of them; repeat.")
@click.option("--licence", default="", help="[default: as its model card or LICENSE says]")
@click.option("--note", default="", help="A line for people.")
@click.option("--sign", "key", type=click.Path(path_type=Path), help="Ed25519 private key, as ssh-keygen makes it.")
@where_option
def push(
    out: Output,
    home: Home,
    source: str,
    name: str,
    alias: str | None,
    evals: Sequence[str],
    licence: str,
    note: str,
    key: Path | None,
    url: str,
) -> None:
    """Store SOURCE, a Hugging Face folder or a run's export, as the next version of NAME.

    SOURCE may also be a version in MLflow: mlflow:MODEL/VERSION or mlflow:MODEL@ALIAS.
    """
    facts: dict[str, Any] = {"evals": _evals(evals), "licence": licence, "sign_with": key}
    store = open_registry(home, url)
    with TemporaryDirectory() as downloads:
        folder, run, own_note = _source(home, source, Path(downloads))
        with out.progress(f"pushing {name}", unit="B") as bar:
            release = store.push(name, folder, run=run, note=note or own_note, **facts, progress=bar.at)
    if alias:
        store.promote(release.text, alias)
    out.say(
        f"{release.text} (sha256:{release.digest[:16]}, {bytes_text(release.manifest.bytes)}) is in {store.store.url}"
    )
    out.say(f"next: {_next_step(url, release, alias, sorted(store.aliases(name)))}")
    out.result(_facts(release), quiet=release.text)


def _next_step(url: str, release: Release, alias: str | None, aliases: Sequence[str]) -> str:
    """Serve it; or, where servers follow an alias of its name, promote it."""
    if alias or not aliases:
        return f"armillary serve registry:{_address(url, f'{release.name}@{alias}' if alias else release.text)}"
    where = f" --registry {url}" if url else ""
    return f"armillary registry promote {release.text} {aliases[0]}{where}, and servers of {aliases[0]} switch over"


@registry.verb
@click.argument("name", required=False)
@where_option
def ls(out: Output, home: Home, name: str | None, url: str) -> None:
    """List the releases, or those of NAME, newest first, with their aliases."""
    store = open_registry(home, url)
    releases = store.releases(name)
    tables = {each: store.aliases(each) for each in {release.name for release in releases}}
    rows = [_row(release, tables[release.name]) for release in releases]
    if rows:
        out.table(store.store.url, list(rows[0]), [list(row.values()) for row in rows])
    else:
        out.say(f"{store.store.url} has no release yet; armillary registry push FOLDER NAME adds one")
    out.result(rows, quiet=[release.text for release in releases])


def _row(release: Release, aliases: dict[str, int]) -> dict[str, object]:
    manifest = release.manifest
    return {
        "release": release.text,
        "aliases": ", ".join(alias for alias, version in aliases.items() if version == release.version),
        "age": seconds_text(max(0.0, time.time() - manifest.created)),
        "size": bytes_text(manifest.bytes),
        "parameters": count_text(manifest.weights.parameters) if manifest.weights.parameters else None,
        "dtype": ", ".join(manifest.weights.dtypes[:2]),
        "digest": release.digest[:12],
        "signed": manifest.signature is not None,
        "note": manifest.note,
    }


@registry.verb
@release_argument
@where_option
@keys_option
def show(out: Output, home: Home, release: str, url: str, keys: str) -> None:
    """Show RELEASE (name, name:version, name@alias, name@sha256:…): facts, files, and moves of its name's aliases."""
    store = open_registry(home, url, keys)
    this = store.resolve(release)
    store.check_trust(this)
    facts, moves = _facts(this), store.history(this.name)
    hidden = ("files", "name", "version", "format", "evals", "signature")
    rows = [(key, _shown(value)) for key, value in facts.items() if key not in hidden and value]
    rows = [(key, _when(this.manifest.created) if key == "created" else value) for key, value in rows]
    rows += [(f"eval {key}", value) for key, value in this.manifest.evals.items()]
    rows.append(("signed by", this.manifest.signature.key if this.manifest.signature else None))
    out.fields(this.text, rows)
    files = [[name, bytes_text(entry.bytes), entry.sha256[:16]] for name, entry in this.manifest.files.items()]
    out.table("files", ["file", "size", "sha256"], files)
    lines = [[_when(move.time), move.kind, move.alias, move.previous, move.version, move.by] for move in moves]
    if lines:
        out.table("aliases", ["time", "move", "alias", "from", "to", "by"], lines)
    history = [{key: value for key, value in to_plain(move).items() if key != "aliases"} for move in moves]
    out.result({**facts, "aliases": store.aliases(this.name), "history": history}, quiet=this.digest)


@registry.verb
@release_argument
@click.argument("alias")
@click.option("--expect", type=click.IntRange(0), help="Only if the alias is at this version now; 0: not set.")
@where_option
def promote(out: Output, home: Home, release: str, alias: str, expect: int | None, url: str) -> None:
    """Point ALIAS at RELEASE. Servers of NAME@ALIAS load it beside the old one and then switch over."""
    store = open_registry(home, url)
    this = store.promote(release, alias, expect=expect)
    out.say(f"{this.name}@{alias} is {this.text}; undo with armillary registry rollback {this.name} {alias}")
    out.result({"name": this.name, "alias": alias, "version": this.version, "digest": this.digest}, quiet=this.text)


@registry.verb
@click.argument("name")
@click.argument("alias")
@where_option
def rollback(out: Output, home: Home, name: str, alias: str, url: str) -> None:
    """Point ALIAS of NAME at the version it had before its last promotion; again: one further back."""
    this = open_registry(home, url).rollback(name, alias)
    out.say(f"{name}@{alias} is {this.text} again")
    out.result({"name": name, "alias": alias, "version": this.version, "digest": this.digest}, quiet=this.text)


@registry.verb
@release_argument
@click.option("--to", "target", metavar="FOLDER|mlflow:MODEL", help="Where to copy it.  [default: a cache]")
@where_option
@keys_option
def pull(out: Output, home: Home, release: str, target: str | None, url: str, keys: str) -> None:
    """Copy RELEASE to this machine; every file is compared with its checksum.

    With --to mlflow:MODEL it becomes the next version of that model in MLflow.
    """
    from armillary.store.registry.mlflow_versions import PREFIX, upload

    store = open_registry(home, url, keys)
    this = store.resolve(release)
    exports = target is not None and target.startswith(PREFIX)
    with out.progress(f"pulling {this.text}", unit="B") as bar:
        folder = store.pull(this, Path(target), bar.at) if target and not exports else store.load(this, bar.at)
    if target and exports:
        version = upload(this, folder, target.removeprefix(PREFIX))
        out.say(f"{this.text} is {version} in MLflow")
        return out.result({"release": this.text, "digest": this.digest, "mlflow": version}, quiet=version)
    out.say(f"{this.text} is in {path_text(folder)}")
    out.result({"release": this.text, "digest": this.digest, "folder": str(folder)}, quiet=str(folder))


@registry.verb
@release_argument
@where_option
@keys_option
def verify(out: Output, home: Home, release: str, url: str, keys: str) -> None:
    """Read RELEASE in its store and compare every file with its checksum."""
    store = open_registry(home, url, keys)
    this = store.resolve(release)
    with out.progress(f"verifying {this.text}", unit="B") as bar:
        store.verify(this, bar.at)
    out.say(f"{this.text} is as it was pushed")
    out.result({"release": this.text, "digest": this.digest}, quiet=this.text)


@registry.verb
@click.option("--keep", type=click.IntRange(1), help="Remove old versions, but the newest KEEP of each name.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@where_option
def gc(out: Output, home: Home, keep: int | None, dry_run: bool, url: str) -> None:
    """Remove files that no version refers to; with --keep, old versions without an alias first."""
    from armillary.store.registry.garbage import collect

    gone = collect(open_registry(home, url), keep=keep, dry_run=dry_run)
    what = "would remove" if dry_run else "removed"
    versions = f"{len(gone.versions)} versions and " if keep else ""
    out.say(f"{what} {versions}{gone.blobs} files ({bytes_text(gone.bytes)})")
    out.result({**to_plain(gone), "dry_run": dry_run}, quiet=gone.versions)


# --- arguments


def _source(home: Home, text: str, downloads: Path) -> tuple[Path, str, str]:
    """(folder, run id, note) of a folder, a run, or a version in MLflow, which is fetched into `downloads`."""
    from armillary.store.registry.mlflow_versions import PREFIX, download
    from armillary.store.runs import find_run, is_run_folder

    if text.startswith(PREFIX):
        fetched = download(text, downloads)
        return fetched.folder, f"{PREFIX}{fetched.run}" if fetched.run else "", fetched.note
    path = Path(text).expanduser()
    if path.is_dir() and not is_run_folder(path):
        return path, "", ""
    if "/" in text and not path.exists():
        raise NotFound(f"no folder {text}; give a Hugging Face folder or a run")
    run = find_run(home, text)
    folder = run.latest_export()
    if folder is None:
        raise NotFound(f"run {run.name} has exported no model; armillary checkpoints export {run.name} writes one")
    return folder, run.id, ""


def _evals(texts: Sequence[str]) -> dict[str, float]:
    """Results from NAME=VALUE and from JSON files, whose nested tables become dotted names."""
    results: dict[str, float] = {}
    for text in texts:
        if Path(text).is_file():
            try:
                results |= _numbers(json.loads(Path(text).read_bytes()))
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{text} is not JSON ({error}); give a file of results, or NAME=VALUE") from None
            continue
        name, _, value = text.rpartition("=")
        try:
            results[name.strip()] = float(value)
        except ValueError:
            raise BadInput(f"--eval {text} is no result; write it like --eval mmlu=0.61, or name a JSON file") from None
    return results


def _numbers(value: Any, prefix: str = "") -> dict[str, float]:
    if isinstance(value, bool) or not isinstance(value, dict | int | float):
        return {}
    if not isinstance(value, dict):
        return {prefix: float(value)}
    return {
        k: v for key, item in value.items() for k, v in _numbers(item, f"{prefix}.{key}" if prefix else key).items()
    }


def _facts(release: Release) -> dict[str, Any]:
    facts: dict[str, Any] = to_plain(release.manifest)
    return {"release": release.text, "version": release.version, "digest": release.digest, **facts}


def _shown(value: Any) -> object:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _address(url: str, reference: str) -> str:
    return f"{url.rstrip('/')}/{reference}" if url else reference
