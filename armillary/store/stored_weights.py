"""What the weight files of a model hold, from their headers alone: bytes that stay packed, and plain numbers.

Packed weights are loaded as they are; numbers stored plain, like embedding and norms, in the dtype of the engine. Read
without torch, for planning: `loaded_bytes` is what the weights take once loaded.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from armillary.errors import BadModel
from armillary.store.gguf.gguf_header import BLOCKS, read_header
from armillary.store.gguf.local_folder import is_gguf
from armillary.store.hf_folder import gguf_file, read_config, weight_files
from armillary.store.safetensors_header import read_entries

_FLOATS = ("F64", "F32", "F16", "BF16")
_BESIDE_CODES = ("scale", "scale_inv", "scales", "absmax", "quant_map", "SCB", "zero_point")
"""ends of the names of floats that belong to packed weights"""
_NOT_KEPT = ("weight_shape", "weight_format", "quant_map", "g_idx")
_ROPE = "rope_freqs.weight"  # of GGUF files, part of the config


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights of a folder or file."""

    packed_bytes: int  # codes and their scales
    plain_numbers: int
    format: str
    """of most packed codes: fp8, int8, int4 or fp4; empty where nothing is packed"""

    def loaded_bytes(self, itemsize: float) -> float:
        """In memory, with `itemsize` bytes per plain number."""
        return self.packed_bytes + self.plain_numbers * itemsize


def stored_weights(source: Path | str) -> StoredWeights | None:
    """Of a model folder or a GGUF file; None for anything else, also a folder whose weights are not (all) there."""
    path = Path(source)
    if is_gguf(path):
        return _of_gguf(path)
    if not (path / "config.json").is_file():
        return None
    try:
        if (file := gguf_file(path)) is not None:
            return _of_gguf(file)
        return _of_safetensors(path)
    except BadModel:  # which only matters to those who load it
        return None


def _of_gguf(path: Path) -> StoredWeights:
    packed, plain, formats = 0, 0, Counter[str]()
    for name, tensor in read_header(path).tensors.items():
        numbers, block_bytes = BLOCKS[tensor.kind]
        if numbers == 1:
            plain += prod(tensor.shape) if name != _ROPE else 0
        else:
            packed += tensor.nbytes
            formats["int8" if block_bytes > 0.8 * numbers else "int4"] += tensor.nbytes
    return StoredWeights(packed_bytes=packed, plain_numbers=plain, format=_most(formats))


def _of_safetensors(folder: Path) -> StoredWeights:
    table = read_config(folder).get("quantization_config")
    packed, plain, formats = 0, 0, Counter[str]()
    for path in weight_files(folder):
        for name, entry in read_entries(path).items():
            if name.endswith(_NOT_KEPT) or ".quant_state." in name:
                continue
            if entry.dtype in _FLOATS and not name.endswith(_BESIDE_CODES):
                plain += prod(entry.shape)
                continue
            packed += entry.nbytes
            if entry.dtype not in _FLOATS:
                formats[_format(name, entry.dtype, table if isinstance(table, dict) else {})] += entry.nbytes
    return StoredWeights(packed_bytes=packed, plain_numbers=plain, format=_most(formats))


def _format(name: str, dtype: str, table: dict[str, Any]) -> str:
    if dtype.startswith("F8"):
        return "fp8"
    if dtype == "I8":
        return "int8"
    if dtype == "I32":  # words of integer codes
        return "int8" if table.get("bits") == 8 or _bits_of_groups(table) == 8 else "int4"
    is_float = name.endswith(("_packed", "_blocks", "_scale", "_scales"))
    return "fp4" if is_float else "int4"


def _bits_of_groups(table: dict[str, Any]) -> Any:
    """num_bits of compressed-tensors, where all groups agree."""
    groups = table.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    bits = [each.get("num_bits") for each in weights if isinstance(each, dict)]
    return bits[0] if bits and all(each == bits[0] for each in bits) else None


def _most(formats: Counter[str]) -> str:
    return formats.most_common(1)[0][0] if formats else ""
