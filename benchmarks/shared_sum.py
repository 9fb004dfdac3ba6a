"""The one-shot all-reduce of ranks on one CPU beside gloo's, alone and in the decode steps of an engine.

    python benchmarks/shared_sum.py --ranks 2
    python benchmarks/shared_sum.py --ranks 2 --model FOLDER       # instead of 57M random weights in fp32

sums    microseconds of a sum over the ranks, median of 5 times 100, by bytes
decode  milliseconds per token of a single stream of 48 tokens, engines with and without in turns, median of 5

The last line is all figures as JSON.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner import tensor_parallel as tp
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.parallel.collectives import Group, all_reduce
from armillary.parallel.shared_sum import SharedSum, sum_over
from armillary.parallel.world import join_world
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.serve import Serve

_TOKENS, _REPEATS = 48, 5
_CPU = torch.device("cpu")
_MODEL = ModelConfig(
    name="model",
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=2048,
    vocab=4096,
    context=512,
    layers=(LayerKind(),) * 12,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as where:
        folder = given.model
        if folder is None:
            folder = save_model(build(_MODEL, dtype=torch.float32, device="cpu", seed=1), Path(where) / "m")
        arguments = (given.ranks, folder, f"{where}/store")
        processes = [start.Process(target=measure, args=(rank, *arguments)) for rank in range(given.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert not any(process.exitcode for process in processes)


def measure(rank: int, ranks: int, folder: Path, store: str) -> None:
    """On each rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = [*sums(ranks, rank), decode(folder)]
    if not rank:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        print(json.dumps(rows))
    dist.destroy_process_group()


def sums(ranks: int, rank: int) -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    group = Group(name=dist.group.WORLD.group_name, size=ranks, rank=rank)
    shared = sum_over(group, _CPU)
    assert isinstance(shared, SharedSum), "these ranks share no memory"
    rows = []
    for size in (1024, 8192, 65_536, 1 << 20):
        x = torch.ones(size)
        gloo, own = each_us(lambda x: all_reduce(x, group), x), each_us(shared, x)
        rows.append({"bytes": x.nbytes, "gloo_us": round(gloo, 1), "shared_us": round(own, 1)})
    return rows


def each_us(reduce: Callable[[Tensor], Tensor], x: Tensor) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(100):
            reduce(x)
        found.append((time.perf_counter() - begin) * 1e4)
    return median(found[1:])


def decode(folder: Path) -> dict[str, Any]:
    """Each engine's ranks follow until it is closed; so the engines of a repeat come one after the other."""
    seconds: dict[str, list[float]] = {"gloo": [], "shared": []}
    for _ in range(_REPEATS):
        for name, found in seconds.items():
            found.append(one_stream(folder, shared=name == "shared"))
    return {f"{name}_ms_per_token": round(1e3 * median(found), 2) for name, found in seconds.items()}


def one_stream(folder: Path, *, shared: bool) -> float:
    """Seconds per token; 0 on the ranks that follow."""
    given = vars(tp)["sum_over"]
    if not shared:
        vars(tp)["sum_over"] = lambda group, device: lambda x: all_reduce(x, group)
    serve = Serve(max_running=4, max_model_len=256, kv_bytes=50_000_000, dtype="fp32", prefix_cache=False)
    try:
        with join_world("cpu") as world, LLM(folder, serve, world=world) as llm:
            if world.rank:
                return float(llm.follow() * 0)
            return per_token(llm)
    finally:
        vars(tp)["sum_over"] = given


def per_token(llm: LLM) -> float:
    """By the difference of a long and a short answer."""
    spent = []
    for tokens in (2, 2, _TOKENS + 2):  # the first is a warm-up
        begin = time.perf_counter()
        llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        spent.append(time.perf_counter() - begin)
    return (spent[2] - spent[1]) / _TOKENS


if __name__ == "__main__":
    main()
