"""Quantized model folders written by the packages that publish such formats, from a tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

K = 64  # inputs of all but the last projection
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 per tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 per row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    ),
    "int8 per row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 groups with zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4 per row": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": 96,
        "hidden_size": K,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(fields | changes))).eval()


def scheme_of(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )


def compress(weight: torch.Tensor, scheme: Any, format: str) -> dict[str, torch.Tensor]:
    """One weight as compressed-tensors writes it."""
    from compressed_tensors.compressors import BaseCompressor

    tensors = {"weight": weight} | _scales(weight, scheme.weights)
    return BaseCompressor.get_value_from_registry(format).compress(tensors, scheme)


def decompress(tensors: dict[str, torch.Tensor], scheme: Any, format: str) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(format).decompress(dict(tensors), scheme)["weight"]


def _scales(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Absolute maxima over groups, and zeros where the scheme has them."""
    largest = {"int": 2 ** (args.num_bits - 1) - 1, "float": 448.0 if args.num_bits == 8 else 6.0}[args.type]
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        return {"weight_scale": blocks.abs().amax(dim=(1, 3)) / largest}
    width = args.group_size or weight.shape[1]
    grouped = weight.reshape(1, 1, -1) if args.strategy == "tensor" else weight.unflatten(1, (-1, width))
    if not args.symmetric:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = ((high - low) / (2**args.num_bits - 1)).clamp_min(1e-6)
        zero = (-(2 ** (args.num_bits - 1)) - low / scale).round().clamp(-(2 ** (args.num_bits - 1)), largest)
        return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    scale = (grouped.abs().amax(-1) / largest).clamp_min(1e-6)
    if args.strategy == "tensor_group":
        divisor = torch.tensor([448 * 6 / float(weight.abs().max())])
        return {"weight_scale": (scale * divisor).to(torch.float8_e4m3fn).float(), "weight_global_scale": divisor}
    if args.num_bits == 4 and args.type == "float":
        scale = torch.exp2(torch.log2(scale).ceil())
    return {"weight_scale": scale.reshape(-1) if args.strategy == "tensor" else scale}


def linears(model: Any) -> dict[str, torch.Tensor]:
    """Weights that published folders quantize: all linear layers but the head."""
    return {
        name: module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def write_folder(
    folder: Path, model: Any, quantization: dict[str, Any], packed: dict[str, dict[str, torch.Tensor]]
) -> Path:
    """`packed` gives the tensors of each quantized module; the others are written plain."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in packed}
    tensors = plain | {f"{module}.{name}": tensor for module, part in packed.items() for name, tensor in part.items()}
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    raw = model.config.to_dict() | {"torch_dtype": "float32", "quantization_config": quantization}
    raw["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    return folder


def compressed_folder(folder: Path, model: Any, scheme: Any, format: str) -> Path:
    """A folder as compressed-tensors writes it."""
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed", ignore=["lm_head"]
    )
    table = json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors"}
    packed = {name: compress(weight, scheme, format) for name, weight in linears(model).items()}
    return write_folder(folder, model, table, packed)


def gptq_folder(folder: Path, model: Any) -> Path:
    table = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    packed = {}
    for name, weight in linears(model).items():
        rows, columns = weight.shape
        packed[name] = {
            "qweight": torch.randint(-(2**31), 2**31 - 1, (columns // 8, rows), dtype=torch.int32),
            "qzeros": torch.randint(-(2**31), 2**31 - 1, (columns // 32, rows // 8), dtype=torch.int32),
            "scales": torch.rand(columns // 32, rows).half(),
            "g_idx": (torch.arange(columns) // 32).int(),
        }
    return write_folder(folder, model, table, packed)


def awq_folder(folder: Path, model: Any) -> Path:
    table = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    packed = {}
    for name, weight in linears(model).items():
        rows, columns = weight.shape
        packed[name] = {
            "qweight": torch.randint(-(2**31), 2**31 - 1, (columns, rows // 8), dtype=torch.int32),
            "qzeros": torch.randint(-(2**31), 2**31 - 1, (columns // 32, rows // 8), dtype=torch.int32),
            "scales": torch.rand(columns // 32, rows).half(),
        }
    return write_folder(folder, model, table, packed)


def nf4_folder(folder: Path, model: Any) -> Path:
    """Maxima quantized too, as bitsandbytes writes them with double quantization."""
    packed = {}
    for name, weight in linears(model).items():
        blocks = weight.numel() // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        packed[name] = {
            "weight": torch.randint(0, 256, (weight.numel() // 2, 1), dtype=torch.uint8),
            "weight.absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8),
            "weight.quant_map": torch.linspace(-1, 1, 16),
            "weight.nested_absmax": torch.rand(-(-blocks // 256)),
            "weight.nested_quant_map": torch.linspace(-1, 1, 256),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
    return write_folder(folder, model, {"quant_method": "bitsandbytes", "load_in_4bit": True}, packed)


def int8_folder(folder: Path, model: Any) -> Path:
    packed = {
        name: {"weight": torch.randint(-127, 128, weight.shape, dtype=torch.int8), "SCB": torch.rand(len(weight))}
        for name, weight in linears(model).items()
    }
    return write_folder(folder, model, {"quant_method": "bitsandbytes", "load_in_8bit": True}, packed)


def fp8_folder(folder: Path, model: Any) -> Path:
    """Blocks of 128 × 128, those at the edges smaller."""
    packed = {
        name: {
            "weight": weight.to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.rand(-(-len(weight) // 128), -(-weight.shape[1] // 128)),
        }
        for name, weight in linears(model).items()
    }
    return write_folder(folder, model, {"quant_method": "fp8", "weight_block_size": [128, 128]}, packed)


def compressed(name: str) -> Callable[[Path, Any], Path]:
    """What writes folders in one of the `SCHEMES`."""
    format, args = SCHEMES[name]
    return lambda folder, model: compressed_folder(folder, model, scheme_of(args), format)


FOLDERS: dict[str, Callable[[Path, Any], Path]] = {
    "gptq": gptq_folder,
    "awq": awq_folder,
    "nf4": nf4_folder,
    "int8": int8_folder,
    "fp8 blocks": fp8_folder,
    **{name: compressed(name) for name in ("fp8 per row", "int8 per row", "int4 groups with zeros", "nvfp4", "mxfp4")},
}
