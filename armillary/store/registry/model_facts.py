"""What a manifest says about a model folder: config, tokenizer, weights, quantization and licence, read without torch.

Pickled files are refused: loading one can run code.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, BadModel, NotFound
from armillary.store import nan_safe_json
from armillary.store.manifest import FileEntry
from armillary.store.registry.reference import is_safe_path
from armillary.store.registry.release import Weights

_SUMMARY = (
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "dtype",
    "torch_dtype",
)
_PICKLES = (".bin", ".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".dill")
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece", "tiktoken")
_WEIGHTS = (".safetensors", ".gguf", ".onnx")
_MAX_HEADER = 100_000_000
"""the safetensors format's own limit of a header"""


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below but hidden ones; links are followed, as in the cache of the Hub."""
    for path in sorted(folder.rglob("*")):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and not path.is_dir():
            yield path


def check_source(folder: Path) -> None:
    """An error where the folder cannot be pushed."""
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}; give the Hugging Face folder to push")
    paths = list(files_in(folder))
    if not paths:
        raise BadInput(f"{folder} holds no files; give the Hugging Face folder to push")
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if not is_safe_path(name):
            raise BadInput(f"the file name {name!r} is not portable; use letters, digits, dots, dashes and spaces")
        if is_pickle(path):
            raise BadModel(
                f"{path} is pickled, and loading it can run code; save the weights as safetensors "
                "(save_pretrained) or leave the file out"
            )


def is_pickle(path: Path) -> bool:
    """By name, or by the first bytes of a pickle (protocol 2 to 5) or a torch archive."""
    if path.suffix.lower() in _PICKLES:
        return True
    if path.suffix in _WEIGHTS:  # their readers never unpickle, and a header's length may look like a pickle
        return False
    with path.open("rb") as file:
        head = file.read(256)
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[2:3] in b"}](cKX\x95"
    return pickled or (head[:4] == b"PK\x03\x04" and b"data.pkl" in head)


def config_summary(folder: Path) -> dict[str, Any]:
    """The fields of the folder's config.json that describe a model's shape."""
    config = _config(folder)
    return {key: config[key] for key in _SUMMARY if key in config}


def quantization(folder: Path) -> dict[str, Any]:
    """How the weights are quantized, as config.json says: method, bits, group size."""
    table = _config(folder).get("quantization_config")
    if not isinstance(table, dict):
        return {}
    return {key: value for key, value in table.items() if isinstance(value, str | int | float | bool)}


def tokenizer_digest(files: Mapping[str, FileEntry]) -> str:
    """One checksum over all files of the tokenizer; empty where there is none."""
    entries = sorted(
        f"{name} {entry.sha256}"
        for name, entry in files.items()
        if name.rpartition("/")[2].startswith(_TOKENIZER) and not name.endswith(_WEIGHTS)
    )
    return hashlib.sha256("\n".join(entries).encode()).hexdigest() if entries else ""


def weights(folder: Path) -> Weights:
    """Format, size, parameters and dtypes of the weights."""
    paths = [path for path in files_in(folder) if path.suffix in _WEIGHTS]
    if not paths:
        return Weights()
    kinds = Counter(path.suffix[1:] for path in paths)
    numbers: Counter[str] = Counter()
    for path in paths:
        if path.suffix == ".safetensors":
            numbers.update(_tensor_numbers(path))
    return Weights(
        format=kinds.most_common(1)[0][0],
        bytes=sum(path.stat().st_size for path in paths),
        parameters=sum(numbers.values()),
        dtypes=tuple(dtype for dtype, _ in numbers.most_common()),
    )


def _tensor_numbers(path: Path) -> Counter[str]:
    """dtype -> numbers in a safetensors file, from its header; nothing where it has none."""
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(size) if 0 < size <= _MAX_HEADER else b""
    try:
        tensors = json.loads(text)
    except ValueError:
        return Counter()
    numbers: Counter[str] = Counter()
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        if name != "__metadata__":
            numbers[str(tensor["dtype"])] += prod(tensor["shape"])
    return numbers


def licence(folder: Path) -> str:
    """The licence in the model card (`license: apache-2.0`), or the first line of a LICENSE file."""
    card = folder / "README.md"
    if card.is_file():
        front = card.read_text(encoding="utf-8", errors="replace").partition("---\n")[2].partition("\n---")[0]
        match = re.search(r"^licen[sc]e:\s*[\"']?([^\s\"']+)", front, re.MULTILINE)
        if match:
            return match[1]
    for path in sorted(folder.glob("LICEN[SC]E*")):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:80] for line in lines if line.strip()), "")
    return ""


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return nan_safe_json.read_table(path) if path.is_file() else {}
