"""LoRA adapters of a folder that peft or `armillary train` has written, in the form of our fused projections.

A fused projection (queries, keys, values; gate and up) gets the matrices A of its parts above each other, and B with
its rows in the fused order; a part without an adapter has zeros. The scale is multiplied into B.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from armillary.errors import BadInput
from armillary.model.weights.hf_layout import Rule, rules
from armillary.spec.model import ModelConfig
from armillary.store.adapter_folders import ADAPTER_CONFIG as CONFIG

# r rank, P parts of a projection, R = P·r, K inputs, N outputs

WEIGHTS = "adapter_model.safetensors"
ADAPTED = {"qkv": "attention.qkv", "out": "attention.out", "gate_up": "mlp.up", "down": "mlp.down"}
"""modules of a block that may have adapters, by their names in a recipe"""
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class AdapterMatrices:
    """Of one projection."""

    a_RK: Tensor
    b_Nr: Tensor


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """What an adapter of rank r on one of our projections looks like."""

    name: str  # of the projection
    rule: Rule
    heights: tuple[int, ...]  # rows of each of its parts
    outputs: int
    inputs: int

    @property
    def part_N(self) -> Tensor:
        """int32: which part each row of the fused matrix is of."""
        numbers = [torch.full((height, 1), part) for part, height in enumerate(self.heights)]
        return self.rule.join(numbers).flatten().to(torch.int32)

    def join(self, rank: int, parts: list[tuple[Tensor, Tensor] | None]) -> AdapterMatrices:
        """Of (A, scaled B) of each part, all padded to one rank."""
        a_PrK, b_s = torch.zeros(len(self.heights), rank, self.inputs), []
        for part, height in enumerate(self.heights):
            b_Nr = torch.zeros(height, rank)
            if (given := parts[part]) is not None:
                a, b = given
                a_PrK[part, : len(a)], b_Nr[:, : b.shape[1]] = a, b
            b_s.append(b_Nr)
        return AdapterMatrices(a_RK=a_PrK.flatten(0, 1), b_Nr=self.rule.join(b_s))


def adapter_shapes(config: ModelConfig, on: Iterable[str] = tuple(ADAPTED)) -> list[AdapterShape]:
    """The projections of a model that may have adapters: those of attention, but for projections to and from latents,
    and of MLPs that are no experts; only those whose names in a recipe are in `on`."""
    shapes, wanted = _weight_shapes(config), [ADAPTED[name] for name in on]
    read = []
    for rule in rules(config):
        module, _, last = rule.name.rpartition(".")
        if last == "weight" and module.partition("blocks.")[2].partition(".")[2] in wanted and rule.name in shapes:
            weight = torch.empty(shapes[rule.name], device="meta")
            heights = tuple(len(part) for part in rule.split(weight))
            outputs, inputs = weight.shape
            read.append(AdapterShape(name=module, rule=rule, heights=heights, outputs=outputs, inputs=inputs))
    return read


def _weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    from armillary.model.transformer import Transformer

    with torch.device("meta"):
        return {name: weight.shape for name, weight in Transformer(config).named_parameters()}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapters of a folder, by the name of our projection."""

    folder: Path
    rank: int
    modules: dict[str, AdapterMatrices]


def read_adapter(
    folder: Path | str, config: ModelConfig, *, max_rank: int, on: tuple[str, ...] = tuple(ADAPTED)
) -> Adapter:
    """BadInput where the folder has something that is not applied here, or belongs to another model."""
    folder = Path(folder)
    settings = _settings(folder)
    tensors = _tensors(folder)
    rank = max((len(a) for a, _ in tensors.values()), default=0)
    if rank > max_rank:
        raise BadInput(f"{folder} has rank {rank}, and there is space for {max_rank}; set serve.adapter_rank={rank}")
    modules = {}
    for shape in adapter_shapes(config):
        parts = [
            _scaled(folder, name, tensors.pop(name), settings, height, shape.inputs) if name in tensors else None
            for name, height in zip(_hf_modules(shape.rule), shape.heights, strict=True)
        ]
        if any(part is not None for part in parts):
            if not shape.name.endswith(tuple(ADAPTED[name] for name in on)):
                missing = next(name for name, module in ADAPTED.items() if shape.name.endswith(module))
                both = ",".join((*on, missing))
                raise BadInput(f"{folder} has adapters on {missing}, and this engine none; set serve.adapter_on={both}")
            modules[shape.name] = shape.join(max_rank, parts)
    if tensors:
        raise BadInput(
            f"{folder} has adapters on {next(iter(tensors))}, which {config.name} does not have or are not served; "
            "merge them into the model, or train on attention and dense MLPs only"
        )
    return Adapter(folder=folder, rank=rank, modules=modules)


def _hf_modules(rule: Rule) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in rule.hf_names)


def _settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json, after what cannot be served was refused."""
    try:
        settings = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} has no readable {CONFIG} ({error}); give a folder that peft has written") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise BadInput(f"{folder} is no LoRA adapter (peft_type); only those are served")
    unusual = {"use_dora": "DoRA", "modules_to_save": "whole modules", "fan_in_fan_out": "transposed weights"}
    for key, what in unusual.items():
        if settings.get(key):
            raise BadInput(f"{folder} has {what} ({key}), which are not served; merge it into the model")
    if settings.get("bias", "none") != "none":
        raise BadInput(f"{folder} has trained biases, which are not served; merge it into the model")
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key), int | float) or not settings[key] > 0:
            raise BadInput(f"{folder} has no positive {key} in {CONFIG}; write the adapter again")
    return settings


def _tensors(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Hugging Face's name of a projection -> (A, B)."""
    if not (folder / WEIGHTS).is_file():
        raise BadInput(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    read: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                module, _, which = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
                if which not in ("lora_A", "lora_B") or not name.endswith(".weight"):
                    raise BadInput(f"{folder} has {name}, which is no LoRA matrix; merge the adapter into the model")
                read.setdefault(module, {})[which] = stored.get_tensor(name).float()
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{folder / WEIGHTS} is truncated or not safetensors ({error}); fetch it again") from None
    if not read:
        raise BadInput(f"{folder} has no adapters in {WEIGHTS}; train it first")
    if missing := next((module for module, both in read.items() if len(both) < 2), None):
        raise BadInput(f"{folder} has only one of both matrices of {missing}; write the adapter again")
    return {module: (both["lora_A"], both["lora_B"]) for module, both in read.items()}


def _scaled(
    folder: Path, name: str, pair: tuple[Tensor, Tensor], settings: dict[str, Any], outputs: int, inputs: int
) -> tuple[Tensor, Tensor]:
    """(A, scale·B) of one projection: the scale is alpha over the rank, or over its root (rsLoRA)."""
    a, b = pair
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != inputs or len(b) != outputs or len(a) != b.shape[1]:
        raise BadInput(
            f"{folder}: the adapter of {name} is {list(a.shape)} and {list(b.shape)}, and the model's weight is "
            f"[{outputs}, {inputs}]; it belongs to another model"
        )
    rank = _of_module(settings.get("rank_pattern"), name, settings["r"])
    if rank != len(a):
        raise BadInput(f"{folder}: the adapter of {name} has rank {len(a)} and {CONFIG} says {rank}; write it again")
    alpha = _of_module(settings.get("alpha_pattern"), name, settings["lora_alpha"])
    return a, b * (alpha / (sqrt(rank) if settings.get("use_rslora") else rank))


def _of_module(pattern: Any, name: str, default: float) -> float:
    """The value for the end of a name that peft's rank_pattern or alpha_pattern has."""
    for key, value in (pattern or {}).items():
        if not re.fullmatch(r"[\w.]+", key):
            raise BadInput(f"{CONFIG} has the pattern {key!r}; name each module, or write the adapter without patterns")
        if f".{name}".endswith(f".{key}"):
            return float(value)
    return float(default)
