"""The quantization_config of a config.json, and the reader of packed modules that it stands for."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from armillary.errors import BadModel, one_line
from armillary.model.quantized import bitsandbytes, compressed_tensors
from armillary.model.quantized.gptq_awq import Awq, Gptq
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import Stored

ReadModule = Callable[[Stored, str, tuple[int, int]], PackedRows | None]
"""(tensors, module, its [N, K]) -> the packed weight; None where the module is stored as plain floats"""


def packed_reader(raw: Mapping[str, Any]) -> ReadModule | None:
    """The reader for the folder of this config.json; None where nothing is quantized."""
    table = raw.get("quantization_config")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise BadModel("quantization_config in config.json is not a table; fetch the model again")
    method = str(table.get("quant_method") or "").lower()
    if not method and ("load_in_4bit" in table or "load_in_8bit" in table):
        method = "bitsandbytes"  # as older releases wrote it
    if method not in _READERS:
        known = ", ".join(_READERS)
        raise BadModel(f"quant_method '{method}' in config.json is not supported; these are: {known}")
    return _READERS[method](table)


def _compressed_tensors(table: dict[str, Any]) -> ReadModule:
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not all(_is_scheme(scheme) for scheme in groups.values()):
        raise BadModel("quantization_config in config.json has no config_groups; fetch the model again")
    sparsity = table.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise BadModel("sparse compressed-tensors weights are not supported; take the dense ones")

    def read(stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
        return compressed_tensors.read_module(stored, module, shape, _scheme_of(module, groups))

    return read


def _is_scheme(scheme: Any) -> bool:
    """An entry of config_groups, its parts of the kinds they should be."""
    if not isinstance(scheme, dict) or not isinstance(scheme.get("targets") or [], list):
        return False
    return all(isinstance(scheme.get(part) or {}, dict) for part in ("weights", "input_activations"))


def _scheme_of(module: str, groups: dict[str, Any]) -> dict[str, Any]:
    """The entry whose targets name the module, by itself or a pattern; else the one for all linear layers."""
    general: dict[str, Any] = {}
    for scheme in groups.values():
        for target in scheme.get("targets") or []:
            if target in ("Linear", "re:.*"):
                general = general or scheme
            elif _matches(module, str(target)):
                return scheme
    return general


def _matches(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return module == target or module.endswith(f".{target}")
    return _pattern(target.removeprefix("re:")).match(module) is not None


_MOST_REPEATS, _LONGEST_PATTERN = 4, 4096


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """A pattern whose matching ends soon: time is at most the length of a module's name to the power of the repeats,
    and exponential where a group is repeated. Published patterns have one to three."""
    shown = one_line(f"re:{text[:80]} in quantization_config")
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", text, flags=re.DOTALL)  # without what is escaped or in a class
    odd = re.search(r"\)[*+{]|\(\?[^:!=<P]|#", plain)
    if odd or len(text) > _LONGEST_PATTERN or len(re.findall(r"[*+{]", plain)) > _MOST_REPEATS:
        raise BadModel(f"the target {shown} is too long or repeats too much; take a simpler pattern")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise BadModel(f"the target {shown} is no pattern; fetch the model again") from None


def _fp8(table: dict[str, Any]) -> ReadModule:
    """Blocks of 128 × 128 as in DeepSeek-V3, or one scale per tensor."""
    block = table.get("weight_block_size")
    rounded = table.get("activation_scheme") in ("dynamic", "static")
    divides = table.get("weight_scale_semantics") == "inverse"  # gptqmodel's weight_scale_inv; DeepSeek's multiplies

    def read(stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
        stored.skip(f"{module}.input_scale", f"{module}.activation_scale")
        for end in ("weight_scale_inv", "weight_scale"):
            if stored.has(f"{module}.{end}"):
                packed = compressed_tensors.read_fp8(stored, module, shape, f"{module}.{end}", block, rounded)
                return _with_reciprocal_scales(packed) if divides and end == "weight_scale_inv" else packed
        return None

    return read


def _with_reciprocal_scales(packed: PackedRows) -> PackedRows:
    return replace(packed, rows=packed.rows | {"scale": packed.rows["scale"].float().reciprocal()})


def _auto_round(table: dict[str, Any]) -> ReadModule:
    """auto-round's own files are in one of the other formats, which `packing_format` names; fp8 goes without."""
    packing = str(table.get("packing_format") or "").removeprefix("auto_round:")
    kind, bits = str(table.get("data_type", "int")), table.get("bits")
    if table.get("rotation_config"):
        raise BadModel("auto-round weights with rotation_config are not supported; take those without")
    if kind == "fp" and bits == 8:
        return _fp8(table)
    if packing == "llm_compressor" and kind == "mx_fp":
        weights = {"num_bits": bits, "type": "float"}
        return _compressed_tensors({"config_groups": {"": {"targets": ["Linear"], "weights": weights}}})
    if kind == "int" and packing in _AUTO_ROUND:
        method, version = _AUTO_ROUND[packing]
        return _READERS[method](table | version)
    raise BadModel(
        f"packing_format {one_line(packing[:40])!r} of data_type {one_line(kind[:40])!r} is not supported; "
        "export the model as auto_gptq, auto_awq or llm_compressor"
    )


_AUTO_ROUND: dict[str, tuple[str, dict[str, str]]] = {
    "auto_gptq": ("gptq", {"checkpoint_format": "gptq"}),
    "gptqmodel": ("gptq", {"checkpoint_format": "gptq_v2"}),
    "auto_round": ("gptq", {"checkpoint_format": "gptq_v2"}),
    "auto_awq": ("awq", {"version": "gemm"}),
}
"""packing_format -> quant_method, and what says how its zeros are stored"""


_READERS: dict[str, Callable[[dict[str, Any]], ReadModule]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": lambda table: Gptq.of(table).read_module,
    "awq": lambda table: Awq.of(table).read_module,
    "auto-round": _auto_round,
    "bitsandbytes": lambda table: bitsandbytes.read_module,
    "mxfp4": lambda table: lambda stored, module, shape: None,  # only stacks of experts: `mxfp4_experts`
}
