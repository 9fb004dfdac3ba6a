"""Memory of the ranks of an engine after start-up: at most a rank's share of the weights, the largest tensor and 5 %.

    python benchmarks/rank_memory.py FOLDER --ranks 2        # a Hugging Face folder, plain or quantized
    python benchmarks/rank_memory.py --make /tmp/model --ranks 4

Each rank is a process of its own over gloo. What it holds is the growth of its anonymous memory from before the model
is loaded until the engine is ready, less the KV cache, which is a few MB here. A warm-up engine of a tiny model comes
first, so that what torch allocates once is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from armillary.engine.llm import LLM
from armillary.engine.runner.rank_layout import RankLayout, rank_layout
from armillary.engine.runner.sharded_weights import local_part, stage_of
from armillary.model.quantized.packed_linear import packed_modules
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import full_names, save_model
from armillary.parallel.world import World, join_world
from armillary.spec.hf.config import from_hf
from armillary.spec.model import LayerKind, ModelConfig, MoE
from armillary.spec.tables.serve import Serve
from armillary.store.hf_folder import read_config

_KV_BYTES = 4_000_000
_MODEL = ModelConfig(
    name="model",
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=64,
    ffn=4096,
    vocab=8192,
    context=1024,
    layers=(LayerKind(),) * 6,
)


_SPARSE = replace(
    _MODEL,
    family="mixtral",
    ffn=1024,
    layers=(LayerKind(mlp="moe"),) * 6,
    moe=MoE(num_experts=8, top_k=2, ffn=1024),
)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def loaded(folder: Path, world: World, pp: int, ep: int) -> LLM:
    sizes: dict[str, Any] = {"max_running": 4, "max_model_len": 128, "max_tokens_per_step": 32}
    serve = Serve(kv_bytes=_KV_BYTES, dtype="fp32", pp=pp, ep=ep, **sizes)
    return LLM(folder, serve, world=world)


def closed(llm: LLM, world: World) -> None:
    if world.is_main:
        llm.generate([[1, 2, 3]])
        llm.close()
    else:
        llm.follow()


def measure(folder: Path, tiny: Path, pp: int, ep: int) -> dict[str, Any]:
    with join_world("cpu", timeout_s=120) as world:
        closed(loaded(tiny, world, pp, ep=1), world)
        # before the engine, in whose start rank 0 waits for the others
        layout = rank_layout(world, from_hf(read_config(folder), name="m"), pp=pp, ep=ep)
        before = anonymous_bytes()
        llm = loaded(folder, world, pp, ep)
        held = anonymous_bytes() - before - _KV_BYTES
        model = llm.engine.loop.executor.executor.forward.model  # type: ignore[attr-defined]
        packed = [module.weight.nbytes for module in packed_modules(model)]
        share, largest = shares(model.config, layout) if not packed else (sum(packed), 0)
        closed(llm, world)
        bound = 1.05 * (share + largest)
        row = {"rank": world.rank, "held_mb": held / 1e6, "share_mb": share / 1e6, "largest_mb": largest / 1e6}
        return row | {"of_bound": held / bound, "full_mb": full_bytes(folder) / 1e6}


def shares(config: ModelConfig, layout: RankLayout) -> tuple[int, int]:
    """(bytes of this rank's shards, bytes of the largest tensor), fp32."""
    total = largest = 0
    with torch.device("meta"):
        tensors = full_names(stage_of(config, layout))
    for name, tensor in tensors.items():
        shape, _ = local_part(name, tensor.shape, config, layout.tp, layout.experts)
        total += 4 * torch.Size(shape).numel()
        largest = max(largest, 4 * tensor.numel())
    return total, largest


def full_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1, help="stages of layers")
    parser.add_argument("--ep", type=int, default=1, help="groups of experts; --make makes a model with experts then")
    parser.add_argument("--tiny", type=Path)
    given = parser.parse_args()
    if given.tiny is not None:
        print(json.dumps(measure(given.folder, given.tiny, given.pp, given.ep)), flush=True)
        return
    folder = given.folder
    if given.make is not None:
        folder = save_model(
            build(_SPARSE if given.ep > 1 else _MODEL, dtype=torch.float32, device="cpu", seed=1),
            given.make,
            overwrite=True,
        )
    with tempfile.TemporaryDirectory() as where:
        small = ModelConfig(
            name="t",
            hidden=64,
            heads=8,
            kv_heads=8,
            head_dim=8,
            ffn=64,
            vocab=64,
            context=128,
            layers=(LayerKind(),) * 4,
        )
        tiny = save_model(build(small, dtype=torch.float32, device="cpu", seed=1), Path(where) / "tiny")
        start = {
            "WORLD_SIZE": given.ranks,
            "LOCAL_WORLD_SIZE": given.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29_611,
        }
        processes = []
        for rank in range(given.ranks):
            own = {key: str(value) for key, value in (start | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            line = [sys.executable, __file__, str(folder), "--tiny", str(tiny)]
            line += ["--pp", str(given.pp), "--ep", str(given.ep)]
            processes.append(subprocess.Popen(line, env=os.environ | own))
        assert not any([process.wait() for process in processes])


if __name__ == "__main__":
    main()
