"""Ranges of an 8-bit KV cache: the largest key and value of each layer, from the scales of a checkpoint.

A checkpoint holds `self_attn.k_scale` and `self_attn.v_scale` (or `k_proj.k_scale`, `v_proj.v_scale`): range / largest
code of the type in its kv_cache_scheme, one for the layer or one per KV head (compressed-tensors and vLLM). Ranges
serve caches of either type.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.kernels.paged.cache_codes import CACHE_DTYPES, largest_code
from armillary.model.quantized.stored import FLOATS
from armillary.model.transformer import Transformer

SCALES = (".k_scale", ".v_scale")
_TYPES = {"float": "fp8", "int": "int8"}


class Tensors(Protocol):
    """Tensors by Hugging Face name."""

    def __contains__(self, name: str) -> bool: ...
    def read_any(self, name: str) -> Tensor: ...


def read_kv_ranges(model: Transformer, tensors: Tensors, raw: Mapping[str, Any]) -> None:
    """Set the ranges of each attention layer that has stored scales; `raw` is config.json."""
    if model.config.mla is not None:  # it caches latents
        return
    largest = largest_code(CACHE_DTYPES[_cache_type(raw)])
    for number, block in model.blocks.items():
        stored = [_scale(tensors, f"model.layers.{number}.self_attn", letter) for letter in "kv"]
        scales = [_checked(*each, model.config.kv_heads) for each in stored if each is not None]
        if len(scales) == 2:
            block.attention.kv_range_2K = torch.stack(scales) * largest


def _scale(tensors: Tensors, prefix: str, letter: str) -> tuple[str, Tensor] | None:
    for name in (f"{prefix}.{letter}_scale", f"{prefix}.{letter}_proj.{letter}_scale"):
        if name in tensors:
            return name, tensors.read_any(name)
    return None


def _checked(name: str, scale: Tensor, kv_heads: int) -> Tensor:
    """[K] in fp32."""
    if scale.dtype not in FLOATS or scale.numel() not in (1, kv_heads):
        raise BadModel(f"{name} is no scale of {kv_heads} KV heads; fetch the model again")
    flat = scale.flatten().float()
    if not bool(((flat > 0) & flat.isfinite()).all()):
        raise BadModel(f"{name} has scales that are not positive numbers; fetch the model again")
    return flat.expand(kv_heads)


def _cache_type(raw: Mapping[str, Any]) -> str:
    """What the scales of a checkpoint are for; fp8 where it does not say."""
    table = raw.get("quantization_config")
    scheme = table.get("kv_cache_scheme") if isinstance(table, dict) else None
    if scheme is None:
        return "fp8"
    kind, bits = (scheme.get("type", "float"), scheme.get("num_bits", 8)) if isinstance(scheme, dict) else (None, None)
    if not isinstance(kind, str) or kind not in _TYPES or bits != 8:
        raise BadModel(
            f"kv_cache_scheme {str(scheme)[:80]} in config.json is not supported; float and int of 8 bits are"
        )
    return _TYPES[kind]


def scheme_of(kind: str) -> dict[str, Any]:
    """The kv_cache_scheme of scales for a cache of `kind`: fp8 or int8."""
    names = {ours: theirs for theirs, ours in _TYPES.items()}
    strategy = "tensor" if kind == "fp8" else "attn_head"
    return {"num_bits": 8, "type": names[kind], "symmetric": True, "dynamic": False, "strategy": strategy}
