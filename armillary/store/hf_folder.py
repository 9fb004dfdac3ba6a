"""A Hugging Face model folder: its config.json and the names of its weight files.

`armillary.model` reads the tensors. Pickled weights are never loaded.
"""

import json
import os.path
from pathlib import Path
from typing import Any

from armillary.errors import BadModel, NotFound

INDEX = "model.safetensors.index.json"
GGUF_MARKER = "weights.gguf.path"
"""a file that names the GGUF file with the weights (`store.gguf.local_folder`)"""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NOT_MODEL_FILES = ("consolidated", "adapter_", "optimizer", "training_args")


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path`, or in the folder `path`."""
    if path.is_dir():
        path = path / "config.json"
        if not os.path.isfile(path):
            raise BadModel(f"{path.parent} has no config.json; give a Hugging Face model folder or a config.json")
    raw = _read_object(path)
    if "model_type" not in raw:
        raise BadModel(f"{path} names no model_type; give the config.json of a Hugging Face model")
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The model's safetensors files, or its GGUF file; BadModel where any is missing."""
    if (file := gguf_file(folder)) is not None:
        return [file]
    names = _indexed(folder) or _unindexed(folder)
    if not names:
        raise _no_weights(folder)
    lacking = [name for name in names if not os.path.isfile(folder / name)]
    if lacking:
        count = f"{len(lacking)} of {len(names)} weight files, the first {lacking[0][:200]}"
        raise BadModel(f"{folder} lacks {count}; download or export the model again")
    return [folder / name for name in names]


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors, complete or not, or names a GGUF file."""
    return os.path.isfile(folder / GGUF_MARKER) or os.path.isfile(folder / INDEX) or bool(_unindexed(folder))


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file with the weights of a folder; None where they are safetensors."""
    if not os.path.isfile(folder / GGUF_MARKER):
        return None
    file = Path(_read_bytes(folder / GGUF_MARKER).decode(errors="replace"))
    if not os.path.isfile(file):  # unlike Path.is_file, also for what is no path
        raise BadModel(f"{str(file)[:200]} is no longer there; give the GGUF file where it is now")
    return file


def _indexed(folder: Path) -> list[str]:
    """File names from the index of a sharded model."""
    if not os.path.isfile(folder / INDEX):
        return []
    return index_files(_read_bytes(folder / INDEX), str(folder / INDEX))


def index_files(content: bytes, where: str) -> list[str]:
    """File names from an index; `where` it is, for errors."""
    table = _parsed(content, where).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise BadModel(f"{where} has no weight_map; download or export the model again")
    names = {str(name) for name in table.values()}
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:
        raise BadModel(f"{where} points outside its folder ({outside[0]}); take the model from its publisher")
    return sorted(names)


def _unindexed(folder: Path) -> list[str]:
    if os.path.isfile(folder / "model.safetensors"):
        return ["model.safetensors"]
    names = (path.name for path in folder.glob("*.safetensors"))
    return sorted(name for name in names if not name.startswith((".", *_NOT_MODEL_FILES)))


def _no_weights(folder: Path) -> BadModel:
    pickles = sorted(
        p.name for p in folder.iterdir() if p.suffix in _PICKLES and not p.name.startswith(_NOT_MODEL_FILES)
    )
    if pickles:
        return BadModel(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    return BadModel(f"{folder} has no weights (*.safetensors); give a folder that has, or add --random-weights")


def _read_object(path: Path) -> dict[str, Any]:
    return _parsed(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no file {path}; check the name") from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read ({error.strerror}); check its type and permissions") from None


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{where} is not JSON ({error}); download or export it again") from None
    if not isinstance(value, dict):
        raise BadModel(f"{where} is not a JSON object; download or export it again")
    return value


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def stored_dtype(folder: Path | None) -> str:
    """The dtype that config.json names, as fp32, bf16 or fp16; fp32 where there is no folder or it names none."""
    raw = read_config(folder) if folder is not None else {}
    return _DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype") or ""), "fp32")
