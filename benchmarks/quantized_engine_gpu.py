"""A single stream of quantized models on one GPU, beside bf16 in the same run.

    python -m benchmarks.quantized_engine_gpu [--model llama-3.1-8b] [--format bf16 fp8 int4] [--folder DIR]

Folders with random codes are written as compressed-tensors stores them (fp8 a scale per row, int4 groups of 128;
embedding and head in bf16) and loaded as published ones are. Targets: fp8 ≥ 1.5 ×, int4 ≥ 1.9 × the rate of bf16.
About 3 minutes on an H200; 17 GB of files in a folder of shared memory.

    python -m benchmarks.quantized_engine_gpu --model gpt-oss-20b --format mxfp4

As GPT-OSS is published, experts in MXFP4 and all else in bf16. Target: half of the rate that its bytes allow.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from armillary.model.weights.hf_weights import load_model
from armillary.spec.catalogue import models
from armillary.spec.hf.config import to_hf
from armillary.spec.model import ModelConfig
from benchmarks.engine_gpu import single
from benchmarks.engine_setup import read_bandwidth

GROUP = 128
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
    ),
}


def linears(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(name, N, K) of a layer's projections."""
    assert config.ffn is not None
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "self_attn.q_proj", width, config.hidden
    yield "self_attn.k_proj", kv_width, config.hidden
    yield "self_attn.v_proj", kv_width, config.hidden
    yield "self_attn.o_proj", config.hidden, width
    yield "mlp.gate_proj", config.ffn, config.hidden
    yield "mlp.up_proj", config.ffn, config.hidden
    yield "mlp.down_proj", config.hidden, config.ffn


def gpt_oss_layer(config: ModelConfig, number: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """A layer as GPT-OSS is published."""
    assert config.moe is not None
    prefix, moe, width = f"model.layers.{number}.", config.moe, config.heads * config.head_dim
    shapes = {"q_proj": width, "k_proj": config.kv_heads * config.head_dim, "v_proj": config.kv_heads * config.head_dim}
    for name, rows in shapes.items():
        yield f"{prefix}self_attn.{name}.weight", drawn(rows, config.hidden, device)
        yield f"{prefix}self_attn.{name}.bias", torch.zeros(rows, dtype=torch.bfloat16)
    yield f"{prefix}self_attn.o_proj.weight", drawn(config.hidden, width, device)
    yield f"{prefix}self_attn.o_proj.bias", torch.zeros(config.hidden, dtype=torch.bfloat16)
    yield f"{prefix}self_attn.sinks", torch.zeros(config.heads, dtype=torch.bfloat16)
    yield f"{prefix}mlp.router.weight", drawn(moe.num_experts, config.hidden, device)
    yield f"{prefix}mlp.router.bias", torch.zeros(moe.num_experts, dtype=torch.bfloat16)
    for name, rows, columns in (
        ("gate_up_proj", 2 * moe.ffn, config.hidden),
        ("down_proj", config.hidden, moe.ffn),
    ):
        blocks, path = (moe.num_experts, rows, columns // 32), f"{prefix}mlp.experts.{name}"
        yield f"{path}_blocks", torch.randint(0, 256, (*blocks, 16), device=device, dtype=torch.uint8)
        yield f"{path}_scales", torch.randint(117, 120, blocks, device=device, dtype=torch.uint8)
        yield f"{path}_bias", torch.zeros(moe.num_experts, rows, dtype=torch.bfloat16)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", torch.ones(config.hidden, dtype=torch.bfloat16)


def drawn(rows: int, columns: int, device: str) -> Tensor:
    return 0.02 * torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def weight(format: str, rows: int, columns: int, device: str) -> dict[str, Tensor]:
    """One random weight as it is stored."""
    if format == "bf16":
        return {"weight": drawn(rows, columns, device)}
    if format == "fp8":
        codes = drawn(rows, columns, device).mul_(5000).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": torch.full((rows, 1), 2e-4, dtype=torch.bfloat16)}
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns // 8), device=device).to(torch.int32)
    scale = torch.full((rows, columns // GROUP), 4e-3, dtype=torch.bfloat16)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}


def write(folder: Path, config: ModelConfig, format: str, device: str) -> Path:
    """A folder of the model's shape with random weights."""
    folder.mkdir(parents=True)
    raw = to_hf(config) | {"torch_dtype": "bfloat16"}
    if format == "mxfp4":
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    elif format != "bf16":
        layout, weights = SCHEMES[format]
        group = {"targets": ["Linear"], "weights": weights}
        raw["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(raw))
    index = {}
    for number in range(config.num_layers):
        layer = gpt_oss_layer(config, number, device) if format == "mxfp4" else _layer(config, number, format, device)
        tensors = dict(layer)
        index |= dict.fromkeys(tensors, _save(folder, f"layer-{number}", tensors))
    ends = {
        name: drawn(config.vocab, config.hidden, device) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    ends["model.norm.weight"] = torch.ones(config.hidden, dtype=torch.bfloat16)
    index |= dict.fromkeys(ends, _save(folder, "ends", ends))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def _layer(config: ModelConfig, number: int, format: str, device: str) -> Iterator[tuple[str, Tensor]]:
    prefix = f"model.layers.{number}."
    for name, rows, columns in linears(config):
        for end, tensor in weight(format, rows, columns, device).items():
            yield f"{prefix}{name}.{end}", tensor.cpu()
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", torch.ones(config.hidden, dtype=torch.bfloat16)


def _save(folder: Path, name: str, tensors: dict[str, Tensor]) -> str:
    file = f"{name}.safetensors"
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / file)
    return file


def measure(config: ModelConfig, format: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = write(options.folder / format, config, format, options.device)
    try:
        model = load_model(folder, device=options.device, packed=True).eval()
    finally:
        shutil.rmtree(folder)
    return single(model, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--format", nargs="+", default=["bf16", "fp8", "int4"], choices=["bf16", "mxfp4", *SCHEMES])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="fewer than the model has: to see that it runs")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, to see that it runs")
    parser.add_argument("--explain", action="store_true", help="kernels of a step")
    options = parser.parse_args()
    options.kv_bytes, options.no_graphs = None, False
    config = models()[options.model].config
    config = config if options.layers is None else config.with_layers(options.layers)
    if ("mxfp4" in options.format) != (config.family == "gpt_oss"):
        parser.error("mxfp4 is for gpt-oss-20b, and the other formats are for dense models")
    options.read = read_bandwidth(options.device)
    rates = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        for format in options.format:
            found = measure(config, format, options)
            rates[format] = found["tokens_per_s"]
            times = {} if "bf16" not in rates else {"times bf16": round(found["tokens_per_s"] / rates["bf16"], 3)}
            print(json.dumps({format: found | times}, default=str), flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
