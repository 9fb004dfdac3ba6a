"""Quantized models as compressed-tensors folders, which transformers and vLLM load: the inverse of its reader here.
Pruned ones have nothing to tell a loader: they are folders of floats."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import HF_NAMES
from armillary.model.quantized.compressed_tensors import E4M3
from armillary.model.quantized.formats import Fp8, IntGroups, Plain
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantizing.quantized_stages import Fused, QuantizedStages
from armillary.model.weights.hf_layout import Rule
from armillary.model.weights.kv_ranges import scheme_of
from armillary.model.weights.safetensors_writer import copy_alongside, refuse_foreign, write_shards
from armillary.store.atomic import staged_folder
from armillary.store.hf_folder import read_config

_SHARD_BYTES = 5_000_000_000
_DYNAMIC = {"symmetric": True, "strategy": "token", "dynamic": True}


def write_compressed(stages: QuantizedStages, source: Path, folder: Path, *, overwrite: bool) -> int:
    """Quantize into a folder with the config and tokenizer of `source`; returns the bytes of all tensors."""
    refuse_foreign(folder)
    listed = _Modules()
    with staged_folder(folder, overwrite=overwrite) as staged:
        size = write_shards(chain(_named(stages.tensors(), listed), _kv_scales(stages)), staged, _SHARD_BYTES)
        copy_alongside(source, staged)
        raw = read_config(source) | ({} if stages.target.spec.pruned else {"quantization_config": listed.table(stages)})
        raw.pop("dtype", None)
        raw["torch_dtype"] = HF_NAMES[stages.target.dtype]
        (staged / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return size


def split_packed(rule: Rule, fused: PackedRows) -> list[PackedRows]:
    """The Hugging Face matrices of a fused one."""
    parts = {name: rule.split(tensor) for name, tensor in fused.rows.items()}
    return [
        PackedRows(
            format=fused.format,
            rows={name: split[i].contiguous() for name, split in parts.items()},
            columns=fused.columns,
        )
        for i in range(len(rule.hf_names))
    ]


def module_tensors(packed: PackedRows) -> dict[str, Tensor]:
    """The tensors of one module, by the ends of their names."""
    rows, format = packed.rows, packed.format
    if isinstance(format, Plain):  # 2:4: floats, zeros among them, as in any checkpoint
        return {"weight": rows["weight"]}
    if isinstance(format, Fp8):
        return {"weight": rows["codes"].view(E4M3), "weight_scale": rows["scale"]}
    if not isinstance(format, IntGroups):  # MXFP4
        return {"weight_packed": rows["codes"], "weight_scale": rows["scale"]}
    if format.bits == 8:
        codes = (rows["codes"].to(torch.int16) - 128).to(torch.int8)
        return {"weight": codes, "weight_scale": rows["scale"]}
    shape = torch.tensor([packed.num_rows, packed.columns])
    tensors = {"weight_packed": _words(rows["codes"]), "weight_scale": rows["scale"], "weight_shape": shape}
    if format.zeros:
        low, high = _even(rows["zero"].t())[:, 0::2], _even(rows["zero"].t())[:, 1::2]
        tensors["weight_zero_point"] = _words(low | high << 4).t().contiguous()
    return tensors


def _even(codes: Tensor) -> Tensor:
    return F.pad(codes, (0, codes.shape[1] % 2))


def _words(codes_nB: Tensor) -> Tensor:
    """Bytes as int32 words, padded with zeros."""
    padded = F.pad(codes_nB, (0, -codes_nB.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(len(padded), -1)


@dataclass
class _Modules:
    """The modules written so far: packed ones by how, and matrices left as they are."""

    packed: dict[str, list[str]] = field(default_factory=dict)  # JSON of the weights' arguments -> modules
    plain: list[str] = field(default_factory=list)

    def table(self, stages: QuantizedStages) -> dict[str, Any]:
        """The quantization_config."""
        ignore = sorted({"lm_head", *(name for name in self.plain if not name.endswith("embed_tokens"))})
        groups = {}
        for i, (arguments, modules) in enumerate(self.packed.items()):
            targets = ["Linear"] if len(self.packed) == 1 else sorted({_pattern(name) for name in modules})
            inputs = _input_arguments(stages)
            weights = json.loads(arguments)
            groups[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": inputs}
        cache = {} if stages.kv is None else {"kv_cache_scheme": scheme_of(stages.kv.kind)}
        return cache | {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[stages.target.name],
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignore,
        }


def _pattern(module: str) -> str:
    """All modules of that name, whatever their layer and expert."""
    return "re:" + re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(module)) + "$"


_FORMATS = {
    "fp8": "float-quantized",
    "int8": "int-quantized",
    "int4-gptq": "pack-quantized",
    "int4-awq": "pack-quantized",
    "int4-rtn": "pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


def _input_arguments(stages: QuantizedStages) -> dict[str, Any] | None:
    if stages.target.spec.round_inputs is None:
        return None
    return _DYNAMIC | {"num_bits": 8, "type": "float" if stages.target.name == "fp8" else "int"}


def _weight_arguments(packed: PackedRows) -> str:
    format = packed.format
    if isinstance(format, Fp8):
        arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    elif not isinstance(format, IntGroups):
        arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        arguments["scale_dtype"] = "torch.uint8"
    else:
        arguments = {"num_bits": format.bits, "type": "int", "symmetric": not format.zeros}
        by_row = format.group == packed.columns
        arguments |= {"strategy": "channel"} if by_row else {"strategy": "group", "group_size": format.group}
    return json.dumps(arguments | {"dynamic": False})


def _kv_scales(stages: QuantizedStages) -> Iterator[tuple[str, Tensor]]:
    """Known once the last block is done."""
    if stages.kv is not None:
        yield from stages.kv.tensors().items()


def _named(tensors: Iterable[tuple[Rule, Fused]], listed: _Modules) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors, noting what became of each module."""
    for rule, fused in tensors:
        modules = [name.removesuffix(".weight") for name in rule.hf_names]
        if isinstance(fused, Tensor):
            if prod(fused.shape) != max(fused.shape) and rule.name.endswith(("weight", "_E2FH", "_EHF")):
                listed.plain += modules
            yield from ((name, part.contiguous()) for name, part in zip(rule.hf_names, rule.split(fused), strict=True))
            continue
        if not isinstance(fused.format, Plain):
            listed.packed.setdefault(_weight_arguments(fused), []).extend(modules)
        for module, part in zip(modules, split_packed(rule, fused), strict=True):
            yield from ((f"{module}.{end}", tensor) for end, tensor in module_tensors(part).items())
