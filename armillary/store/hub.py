"""Downloads from the Hugging Face Hub through huggingface_hub, with its cache, token and offline mode.

Only config, safetensors and tokenizer of the top folder are downloaded, never pickled weights.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, BadModel, MissingPart, NotFound
from armillary.store.atomic import plain_errors
from armillary.store.hf_folder import has_weights, weight_files
from armillary.store.progress import Progress, reporting_bar, silent

_SMALL = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
# Some repositories hold the weights a second time, in subfolders or in the publisher's own format.
_NEVER = ["*/*.safetensors*", "*/tokenizer*", "tokenizer*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.pkl"]
_LOGIN = "run hf auth login (or set HF_TOKEN)"
_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def split_id(text: str) -> tuple[str, str | None] | None:
    """'owner/name@revision' -> (id, revision); None where the text is no Hub id."""
    match = _ID.fullmatch(text)
    return (match["id"], match["revision"]) if match else None


def fetch(
    model: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    progress: Progress = silent,
    endpoint: str | None = None,
) -> Path:
    """The cached folder of a Hub model, downloaded first where it is missing."""
    hub = _library()
    try:
        with plain_errors(Path(hub.constants.HF_HUB_CACHE)):
            folder = hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=_SMALL + _WEIGHTS if weights else _SMALL,
                ignore_patterns=_NEVER,
                tqdm_class=reporting_bar(progress),
                endpoint=endpoint,
                library_name="armillary",
            )
    except (
        OSError,
        ValueError,
        RuntimeError,
        hub.errors.HTTPError,
    ) as error:  # RuntimeError: of the xet transfer library
        raise _as_error(hub, error, model, revision, endpoint or hub.constants.ENDPOINT) from error
    return _checked(Path(folder), model, weights)


def _library() -> Any:
    try:
        hub = import_module("huggingface_hub")
        for part in ("constants", "errors"):
            import_module(f"huggingface_hub.{part}")
    except ImportError:
        raise MissingPart("models from the Hub need huggingface_hub: pip install huggingface_hub") from None
    return hub


def _checked(folder: Path, model: str, weights: bool) -> Path:
    """The folder, once it is complete: offline, older versions of the library return incomplete folders."""
    if not (folder / "config.json").is_file():
        raise BadModel(f"{model} has no config.json on the Hub; give a model in transformers format")
    if weights and not has_weights(folder):
        raise BadModel(f"{model} has no safetensors in the cache or on the Hub; go online, or choose a model that has")
    if weights:
        weight_files(folder)
    return folder


def _as_error(hub: Any, error: Exception, model: str, revision: str | None, endpoint: str) -> ArmillaryError:
    """A library error as one line."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return NotFound(f"{model} is gated: accept its terms at {endpoint}/{model}, then {_LOGIN}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFound(f"no model {model} at {endpoint}; check the name, or {_LOGIN} if it is private")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(f"{model} has no revision {revision}; leave @{revision} out for the main one")
    if isinstance(error, errors.HFValidationError):
        return BadInput(f"'{model}' is not a Hub id; write owner/name or owner/name@revision")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _not_cached(error, hub.constants.HF_HUB_OFFLINE, model, endpoint)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, model, endpoint)
    reason = str(error).partition("\n")[0] or type(error).__name__
    return ArmillaryError(f"the download of {model} stopped ({reason}); run it again to continue")


def _not_cached(error: BaseException, offline: bool, model: str, endpoint: str) -> ArmillaryError:
    response = getattr(error.__cause__, "response", None)
    if offline:
        return NotFound(f"{model} is not completely in the cache and HF_HUB_OFFLINE is set; unset it to fetch")
    if response is not None:
        return _refused(error.__cause__, model, endpoint)
    return NotFound(f"cannot reach {endpoint} and {model} is not completely in the cache; check the network")


def _refused(error: Any, model: str, endpoint: str) -> ArmillaryError:
    status = error.response.status_code
    if status in (401, 403):
        return NotFound(f"{endpoint} refuses the token for {model} ({status}); {_LOGIN} again")
    return ArmillaryError(f"{endpoint} returned {status} for {model}; try again later")
