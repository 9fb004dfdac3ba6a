"""What a start on several ranks reads, and what memory it takes: a model folder on 4 CPU ranks, tp 2 × FSDP 2.

    python benchmarks/sharded_loading.py [--gigabytes 4] [--layout dp=2,tp=2,zero=3] [--folder SCRATCH]

Writes a random model in bf16 to the scratch folder (twice its size of free memory is needed for that), starts the ranks
over gloo, loads it, and prints the table of sharded_loading.md: bytes read and received, peak memory over what a rank
held before, seconds. Then every rank compares each of its shards with the full tensor that one process would load.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from armillary.machine.machine import here
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import full_names, save_model, stored_parts
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.parallel.apply import apply
from armillary.parallel.consensus import Consensus
from armillary.parallel.mesh import make_mesh
from armillary.parallel.shard_weights import fill_from, fill_random, local_part, materialise
from armillary.parallel.world import World
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, ModelConfig
from armillary.training.step.loss import loss_sum
from armillary.units import bytes_text

BASE = ModelConfig(
    name="scratch",
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=8192,
    vocab=64_001,
    context=4096,
    layers=(LayerKind(),),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--layout", default="dp=2,tp=2,zero=3")
    parser.add_argument("--folder", type=Path, default=None, help="scratch folder; deleted afterwards unless given")
    options = parser.parse_args()
    layout = Layout(**{key: int(value) for key, value in (item.split("=") for item in options.layout.split(","))})
    print(here().text())
    scratch = options.folder or Path(tempfile.mkdtemp(dir=Path.cwd()))
    try:
        config = sized(options.gigabytes)
        folder = scratch / "model"
        if not folder.exists():
            save_model(build(config, dtype=torch.bfloat16, device="cpu", seed=0), folder, shard_bytes=1_000_000_000)
        compare(config, folder, layout, scratch)
    finally:
        if options.folder is None:
            shutil.rmtree(scratch)


def sized(gigabytes: float) -> ModelConfig:
    """With as many layers as fit."""
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in Transformer(replace(BASE, layers=(LayerKind(),) * count)).parameters())
            for count in (1, 2)
        ]
    more = round((gigabytes * 1e9 / 2 - sizes[0]) / (sizes[1] - sizes[0]))
    return replace(BASE, layers=(LayerKind(),) * (1 + max(0, more)))


def compare(config: ModelConfig, folder: Path, layout: Layout, scratch: Path) -> None:
    world = layout.num_devices
    results = scratch / f"results-{os.getpid()}"
    results.mkdir()
    mp.spawn(load, (config, folder, layout, results), nprocs=world)  # type: ignore[no-untyped-call]
    found = [torch.load(results / str(rank)) for rank in range(world)]
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    total = sum(each["read"] for each in found)
    print(f"{layout.text()}, {world} ranks on gloo; {bytes_text(stored)} in the files")
    print("| rank | share | read | received | peak memory | share + largest tensor + 5 % | load | random values |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rank, each in enumerate(found):
        sizes = [bytes_text(each[key]) for key in ("share", "read", "received", "peak", "bound")]
        print(f"| {rank} | {' | '.join(sizes)} | {each['seconds']:.1f} s | {each['drawn_s']:.1f} s |")
    print(f"read in total: {bytes_text(total)}, {total / stored:.4f} of the files")
    print(f"peak memory within its bound: {all(each['peak'] <= each['bound'] for each in found)}")
    print(f"shards that differ from a single-process load: {sum(each['wrong'] for each in found)}")


def load(rank: int, config: ModelConfig, folder: Path, layout: Layout, results: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = layout.num_devices
    dist.init_process_group("gloo", init_method=f"file://{results / 'store'}", rank=rank, world_size=size)
    mesh = make_mesh(layout, World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu")))
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    apply(model, layout, mesh, loss=loss_sum)
    materialise(model, "cpu")
    parts = {name: local_part(tensor) for name, tensor in full_names(model).items()}
    share = sum(part.local.nbytes for part in parts.values())
    largest = max(2 * tensor.numel() for tensor in full_names(model).values())
    dist.barrier()
    before, begin = reset_peak(), time.perf_counter()
    loaded = fill_from(model, folder, ranks=Consensus(rank=rank, size=size), machines=mesh.machines)
    peak, seconds = memory("VmHWM") - before, time.perf_counter() - begin
    result: dict[str, Any] = {"share": share, "read": loaded.read_bytes, "received": loaded.received_bytes}
    result |= {"peak": peak, "bound": int(1.05 * (share + largest)), "seconds": seconds}
    result["wrong"] = differing(model, folder)
    begin = time.perf_counter()
    fill_random(model, seed=0)
    torch.save(result | {"drawn_s": time.perf_counter() - begin}, results / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def differing(model: Transformer, folder: Path) -> int:
    """Shards that are not that part of the full tensor, joined as a single process joins it."""
    wrong = 0
    with TensorFolder(folder) as stored, torch.no_grad():
        for rule, _ in stored_parts(model, stored):
            part = local_part(full_names(model)[rule.name])
            box = zip(part.offsets, part.local.shape, strict=True)
            full = rule.join([stored.read(name) for name in rule.hf_names])
            wrong += not torch.equal(part.local, full[tuple(slice(begin, begin + size) for begin, size in box)])
    return wrong


def reset_peak() -> int:
    """Bytes of memory in use now; the peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    main()
