"""The multi-token-prediction layers of a Hugging Face folder, read beside the model, and trained draft heads, which are
such a layer in a folder of their own in it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.kernels.core.dtype import parse_dtype
from armillary.model.moe.experts import Router
from armillary.model.multi_token import MtpLayer
from armillary.model.quantized.quantization_config import ReadModule, packed_reader
from armillary.model.weights.hf_layout import Rule, mtp_rules, num_mtp_layers
from armillary.model.weights.hf_weights import as_stored
from armillary.model.weights.packed_weights import PackedFolder
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.model.weights.safetensors_writer import write_tensors
from armillary.spec.hf.config import from_hf
from armillary.spec.model import ModelConfig
from armillary.store.atomic import staged_folder
from armillary.store.hf_folder import read_config

DRAFT_HEAD = "draft_head"
"""folder of a trained head within the model's, with the names that the layer would have after the model's last"""
_FACTS = "draft_head.json"


@torch.no_grad()
def load_draft_head(folder: Path, *, dtype: torch.dtype | str | None, device: torch.device | str) -> MtpLayer | None:
    """The trained head, else the model's first layer for multi-token prediction; None where there is neither."""
    if not (folder / DRAFT_HEAD).is_dir():
        return next(iter(load_mtp_layers(folder, dtype=dtype, device=device)), None)
    config = from_hf(read_config(folder), name=f"{folder.name}/{DRAFT_HEAD}")
    with TensorFolder(folder / DRAFT_HEAD) as stored:
        wanted = parse_dtype(dtype) if dtype is not None else stored.dtype()
        return _load(config, stored, None, 0, wanted, torch.device(device))


def save_draft_head(layer: MtpLayer, config: ModelConfig, folder: Path, facts: dict[str, Any]) -> Path:
    """Write a head, in the dtype of the model's weights, and what is known of it into the folder of its model; an
    earlier one is replaced."""
    with TensorFolder(folder) as stored:
        dtype = stored.dtype()
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    stored_as: dict[str, Tensor] = {}
    for rule in mtp_rules(config, 0):
        parts = rule.split(tensors[rule.name].detach().cpu())
        stored_as |= {
            name: part.to(dtype).contiguous().clone() for name, part in zip(rule.hf_names, parts, strict=True)
        }
    with staged_folder(folder / DRAFT_HEAD, overwrite=True) as staged:
        write_tensors(staged / "model.safetensors", stored_as)
        (staged / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    return folder / DRAFT_HEAD


@torch.no_grad()
def load_mtp_layers(
    folder: Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> list[MtpLayer]:
    """The layers of a folder in the order of their depth, empty where it has none; `dtype` None keeps the folder's.
    Quantized weights are dequantised."""
    raw = read_config(folder)
    config = from_hf(raw, name=folder.name)
    with TensorFolder(folder) as stored:
        wanted = parse_dtype(dtype) if dtype is not None else stored.dtype()
        layers = range(num_mtp_layers(config, stored.__contains__))
        return [_load(config, stored, packed_reader(raw), depth, wanted, torch.device(device)) for depth in layers]


def _load(
    config: ModelConfig,
    stored: TensorFolder,
    read_module: ReadModule | None,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MtpLayer:
    with torch.device("meta"):
        layer = MtpLayer(config)
    layer = layer.to(dtype).to_empty(device=device)
    for module in layer.modules():
        if isinstance(module, Router):
            module.reset()
    tensors, all_rules = dict(layer.named_parameters()) | dict(layer.named_buffers()), mtp_rules(config, depth)
    packed = None if read_module is None else PackedFolder(config, stored, read_module, layer, all_rules)
    for rule in all_rules:
        if packed is not None and packed.is_packed(rule):
            tensors[rule.name].copy_(packed.dequantised(rule))
            continue
        rule = as_stored(rule, stored)
        _check(config, rule, stored, tensors[rule.name].shape)
        tensors[rule.name].copy_(rule.join([stored.read(name) for name in rule.hf_names]))
    return layer


def _check(config: ModelConfig, rule: Rule, stored: TensorFolder, wanted: torch.Size) -> None:
    missing = [name for name in rule.hf_names if name not in stored]
    shape = None if missing else rule.joined_shape([stored.where(name).shape for name in rule.hf_names])
    if shape != wanted:
        name = missing[0] if missing else rule.hf_names[0]
        problem = "is missing" if missing else f"makes {list(shape or [])} where config.json says {list(wanted)}"
        raise BadModel(f"{config.name}: {name} {problem}; config.json and weights are not of one model")
