"""A Hugging Face model folder in a store that fsspec reaches: small files are copied to this machine, weights stay.

`local_files` makes a folder with config.json, tokenizer and the index of the weights, and a file that says where the
weights are; whoever opens its tensors reads byte ranges from there.
"""

from hashlib import sha256
from pathlib import Path

from armillary.errors import BadModel
from armillary.store.atomic import write_bytes, write_text
from armillary.store.hf_folder import INDEX, index_files
from armillary.store.home import Home
from armillary.store.remote import Remote, is_url

MARKER = "weights.url"
"""a file of the local folder"""
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    INDEX,
)


def local_files(url: str, home: Home | None = None) -> Path:
    """A local folder with everything of the model but its weights, copied anew at each call."""
    remote = Remote(url=url.rstrip("/"))
    present = [name for name in _FILES if remote.exists(name)]
    if "config.json" not in present:
        raise BadModel(f"{url} has no config.json; give the address of a Hugging Face model folder")
    digest = sha256(remote.url.encode()).hexdigest()[:12]
    folder = (home or Home.default()).cache / "remote_models" / f"{remote.url.rpartition('/')[2]}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in present:
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, b"".join(remote.read(name)))
    for name in set(_FILES) - set(present):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / MARKER, remote.url)
    return folder


def weights_url(folder: Path | str) -> str:
    """Where the weights of a model are that are not in its folder (itself, where it is an address); else empty."""
    if is_url(str(folder)):
        return str(folder).rstrip("/")
    marker = Path(folder) / MARKER
    return marker.read_text().strip() if marker.is_file() else ""


def remote_weight_files(url: str) -> list[str]:
    """Names of the safetensors files of a model in a store."""
    remote = Remote(url=url)
    if remote.exists(INDEX):
        return index_files(b"".join(remote.read(INDEX)), f"{url}/{INDEX}")
    if not remote.exists("model.safetensors"):
        raise BadModel(f"{url} has no weights (*.safetensors); give a model that has, or add --random-weights")
    return ["model.safetensors"]
