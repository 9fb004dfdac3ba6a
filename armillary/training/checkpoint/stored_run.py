"""A run's folder in a store: whose it is, which of its checkpoints stay, and how the newest one comes back.

URL/NAME/run.json        the key of the run that it belongs to, and what defines its recipe
URL/NAME/STEP/           its checkpoints (upload.py)
runs/ID/stored_run.json  the same key: on another machine, the run that `--run NAME` names takes it on
"""

import secrets
from collections.abc import Callable
from typing import Any

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.spec.recipe import class_of, flat, recipe_from_dict
from armillary.store import nan_safe_json
from armillary.store.atomic import staged_folder, write_json
from armillary.store.manifest import content_faults, size_faults
from armillary.store.runs import Run
from armillary.training.checkpoint import upload
from armillary.training.checkpoint.retention import Entry

OWNER, KEY_FILE = "run.json", "stored_run.json"
_PLACES = ("model.path", "data.source", "data.path", "data.paths", "data.blend", "data.tokenizer", "data.template")
"""keys that may name files, which are elsewhere on another machine; resuming compares the text itself"""
_OTHER = "give this one another name with --new --run NAME, or another train.checkpoint_url"


def run_url(url: str, run: Run) -> str:
    """Where the checkpoints of a run are in a store: by its short name, so that `--run NAME` finds them elsewhere."""
    return f"{url.rstrip('/')}/{run.name}"


# --- whose it is


def stored_names(url: str) -> list[str]:
    """Names of the runs in a store, which a new run must not draw; none where it does not answer at once."""
    try:
        return upload.folder_names(url, retries_s=()) if url else []
    except upload.StoreFails:
        return []


def begin_own(run: Run) -> None:
    """A run that begins anew and continues none of a store, whatever its name."""
    write_json(run.folder / KEY_FILE, {"key": secrets.token_hex(8), "begun_here": True})


def claim(run: Run, url: str) -> None:
    """Make the folder in the store this run's, where it is nobody's, or where the run is new here and continues it.
    BadInput where it is another run's."""
    place, key = run_url(url, run), _own(run).get("key")
    owner = upload.read_json(f"{place}/{OWNER}")
    if owner is None:
        if not key:
            begin_own(run)
        upload.write_json(f"{place}/{OWNER}", {"key": _own(run)["key"], "run": run.id, "recipe": _defining(run)})
    elif not key:
        _refuse_another(place, owner["recipe"], _defining(run))
        write_json(run.folder / KEY_FILE, {"key": owner["key"], "begun_here": False})
    elif key != owner["key"]:
        raise BadInput(f"{place} has checkpoints of another run ({owner['run']}); {_OTHER}")


def _own(run: Run) -> dict[str, Any]:
    path = run.folder / KEY_FILE
    return nan_safe_json.read_table(path) if path.exists() else {}


def _defining(run: Run) -> dict[str, Any]:
    """The keys of its recipe that define it, but for places of files."""
    try:
        keys = flat(recipe_from_dict(run.recipe))
    except ArmillaryError:  # a run of a library's user, who needs no recipe
        return {}
    keys = {key: value for key, value in keys.items() if ".".join(key.split(".")[:2]) not in _PLACES}
    defining = {key: value for key, value in keys.items() if class_of(key) == "defining"}
    return dict(nan_safe_json.loads(nan_safe_json.dumps(defining)))


def _refuse_another(place: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        was = f"{key} was {before.get(key)} and is {now.get(key)}"
        raise BadInput(f"{place} has checkpoints of another recipe ({was}); restore it, or {_OTHER}")


# --- which stay


def stored_entry(place: str, step: int) -> Entry | None:
    """What retention has to know of a checkpoint in a store; None where it does not say, so that it stays."""
    try:
        manifest = upload.read_json(f"{place}/{step}/{upload.MANIFEST}")
    except BadData:
        manifest = None
    if manifest is None:
        return Entry(step=step, complete=False)
    about = manifest.get("retention")
    return Entry(step=step, val_loss=about.get("val_loss"), base=about.get("base")) if about else None


# --- how it comes back


def fetch_newest(
    run: Run, url: str, say: Callable[[str], None] = lambda text: None, *, newer_than: int = 0, lost: bool = False
) -> int:
    """Copy the newest good checkpoint of the store that is newer than that step into the run's folder; its step, or 0.
    Damaged ones are left out, with a line. A store that fails costs a line where the run has a checkpoint or begins
    here; else, or where its own were `lost`, it would start over, and StoreFails is raised."""
    new = bool(_own(run).get("begun_here")) and not lost
    try:
        return _fetch_newest(run, url, say, newer_than)
    except upload.StoreFails as error:
        if not newer_than and not new:
            raise
        say(f"{error}; the run goes on without what is there")
        return 0


def _fetch_newest(run: Run, url: str, say: Callable[[str], None], newer_than: int) -> int:
    claim(run, url)
    place = run_url(url, run)
    for step in reversed(upload.complete_steps(place)):
        if step <= newer_than:
            break
        say(f"fetching checkpoint {step} from {place}")
        try:
            _fetch(run, place, step)
            return step
        except BadData as error:
            say(f"checkpoint {step} of the store is not used: {error}")
    return 0


def _fetch(run: Run, place: str, step: int) -> None:
    """One checkpoint; it gets its name after the full one that it needs."""
    with staged_folder(run.checkpoint(step), overwrite=True) as folder:
        upload.fetch(f"{place}/{step}", folder)
        if faults := size_faults(folder):
            raise BadData(f"{place}/{step} is incomplete ({faults[0]}); remove that checkpoint there")
        base = nan_safe_json.read_table(folder / "state.json").get("delta_of")
        full = None if base is None else run.checkpoint(int(base))
        if full is not None and (size_faults(full) or content_faults(full)):
            _fetch(run, place, int(full.name))
