"""Quantized models as GGUF files, written tensor by tensor with the gguf package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.errors import BadInput
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantizing.compressed_writer import split_packed
from armillary.model.quantizing.quantization_targets import gguf_package, plain_kind
from armillary.model.quantizing.quantized_stages import Fused, QuantizedStages
from armillary.model.transformer import Transformer
from armillary.model.weights.gguf_weights import gguf_name, in_file_order
from armillary.model.weights.hf_layout import Rule, rules
from armillary.spec.model import ModelConfig
from armillary.store.atomic import staged_file
from armillary.store.gguf.gguf_fields import architecture, model_fields, rope_divisors, tokenizer_fields
from armillary.store.gguf.gguf_header import BLOCKS

_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}  # general.file_type (llama.h)


def write_gguf(stages: QuantizedStages, source: Path, path: Path, *, overwrite: bool) -> int:
    """Quantize into one file; returns its bytes."""
    if path.suffix != ".gguf":
        raise BadInput(f"{path} does not end in .gguf; call it {path.with_suffix('.gguf')}")
    if path.exists() and not overwrite:
        raise BadInput(f"{path} is already there; give --overwrite or another name")
    config = stages.stages.config
    fields = model_fields(config) | tokenizer_fields(source, config.vocab)
    with staged_file(path) as staged:
        writer = gguf_package().GGUFWriter(staged, architecture(config))
        writer.add_file_type(_FILE_TYPES[stages.target.spec.gguf])
        writer.add_quantization_version(2)
        for key, value in fields.items():
            _add(writer, key, value)
        _announce(writer, stages)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for content in _contents(stages):
            writer.write_tensor_data(content)
        writer.close()
    return path.stat().st_size


def _add(writer: Any, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _announce(writer: Any, stages: QuantizedStages) -> None:
    """Name, shape and type of every tensor, in the order in which they come."""
    kinds = gguf_package().GGMLQuantizationType
    for rule, shapes in _shapes(stages.stages.config):
        for name, shape in zip(rule.hf_names, shapes, strict=True):
            kind = kind_of(stages, rule, shape)
            numbers, size = BLOCKS[kind]
            in_bytes = (*shape[:-1], shape[-1] // numbers * size)
            writer.add_tensor_info(gguf_name(name), in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), kinds[kind])
    if (divisors := rope_divisors(stages.stages.config)) is not None:
        shape = (len(divisors),)
        writer.add_tensor_info("rope_freqs.weight", shape, np.dtype(np.float32), 4 * len(divisors), kinds.F32)


def kind_of(stages: QuantizedStages, rule: Rule, shape: tuple[int, ...]) -> str:
    """The type of a tensor: vectors are fp32 in every file."""
    if len(shape) == 1:
        return "F32"
    return stages.target.spec.gguf if stages.is_quantized(rule, shape[1]) else plain_kind(stages.target.dtype)


def _shapes(config: ModelConfig) -> Iterator[tuple[Rule, list[tuple[int, ...]]]]:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Transformer(config).named_parameters()}
    for rule in rules(config):
        yield rule, [tuple(part.shape) for part in rule.split(torch.empty(shapes[rule.name], device="meta"))]


def _contents(stages: QuantizedStages) -> Iterator[np.ndarray]:
    for rule, fused in stages.tensors():
        for name, part in zip(rule.hf_names, _parts(rule, fused), strict=True):
            yield in_file_order(name, part, stages.stages.config).contiguous().view(torch.uint8).numpy()
    if (divisors := rope_divisors(stages.stages.config)) is not None:
        yield np.array(divisors, dtype=np.float32)


def _parts(rule: Rule, fused: Fused) -> list[Tensor]:
    if isinstance(fused, Tensor):
        return [part.float() if part.ndim == 1 else part for part in rule.split(fused)]
    assert isinstance(fused.format, GgufBlocks)
    return [part.rows["blocks"] for part in split_packed(rule, fused)]
