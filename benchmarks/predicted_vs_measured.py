"""What `spec` predicts beside what the module, the files and torch's own counter say.

    python benchmarks/predicted_vs_measured.py [MODEL …]

Parameters and floating-point operations are counted on the meta device, so any size runs on a laptop; the size on disk
and of the KV cache are measured on a cut of two layers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from armillary.kernels.attention.attention import AttentionOptions
from armillary.model.supported_shapes import unbuildable
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_layout import FAMILIES
from armillary.model.weights.hf_weights import save_model
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import kv_bytes_per_token, parameters
from armillary.spec.arithmetic.workload import forward_ops, make_batch
from armillary.spec.model import ModelConfig
from tests.model.contiguous_cache import ContiguousCache

DEFAULT = ("armillary-25m", "gpt2", "llama-3-8b", "qwen3-8b", "gemma-2-9b", "phi-4", "olmo-2-7b", "llama-3.1-405b")
SEQUENCE = 2048


def main(names: list[str]) -> None:
    rows = [row for name in names or DEFAULT for row in measure(catalogue.model(name).config)]
    print(f"{'model':16} {'figure':34} {'predicted':>22} {'measured':>22} {'error':>8}")
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        print(f"{row['model']:16} {row['figure']:34} {row['predicted']:22,.0f} {row['measured']:22,.0f} {error:8.2%}")
    print(json.dumps(rows))


def measure(config: ModelConfig) -> list[dict[str, object]]:
    if unbuildable(config):
        return []
    with torch.device("meta"):
        whole = Transformer(config)
    found = [("parameters", parameters(config).total, sum(p.numel() for p in whole.parameters()))]
    if not config.num_moe_layers:  # routing needs real values
        found.append((f"matrix FLOPs of a forward, {SEQUENCE} tokens", matrix_flops(config), counted_flops(whole)))
    found += cut_figures(config.with_layers(min(2, config.num_layers)))
    return [{"model": config.name, "figure": f, "predicted": p, "measured": m} for f, p, m in found]


def matrix_flops(config: ModelConfig) -> float:
    """Projections and head; attention is a kernel of its own."""
    ops = forward_ops(config, make_batch([SEQUENCE]))
    return sum(op.flops for op in ops if op.on_matrix_units and "attention" not in op.kind)


def counted_flops(model: Transformer) -> int:
    """torch's count with an attention that does nothing."""

    def skip(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        return q

    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens, tokens, skip))
    return counter.get_total_flops()


def cut_figures(config: ModelConfig) -> list[tuple[str, float, float]]:
    """Sizes that two layers show as well as all of them."""
    cache = ContiguousCache(config, batch=1, length=64, dtype=torch.bfloat16, device="cpu")
    cached = (cache.keys_LBSKD.nbytes + cache.values_LBSKD.nbytes) / 64
    found = [("KV bytes a token, 2 layers", kv_bytes_per_token(config), cached)]
    if config.family in FAMILIES and parameters(config).total < 1e9:
        model = build(config, dtype=torch.bfloat16, device="cpu", seed=0)
        with tempfile.TemporaryDirectory() as folder:
            files = save_model(model, Path(folder) / "m").glob("*.safetensors")
            found.append(
                ("bytes on disk in bf16, 2 layers", 2 * parameters(config).total, sum(f.stat().st_size for f in files))
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of the catalogue; otherwise {', '.join(DEFAULT)}")
    main(parser.parse_args().models)
