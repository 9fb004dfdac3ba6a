"""Two stages of layers with a step each, beside one step in flight that passes through both: tokens/s and busy shares.

    python benchmarks/pipeline_stages.py                       # 57M random weights in fp32, 16 requests at a time
    python benchmarks/pipeline_stages.py --running 1 --repeats 3

Each stage is a process with one thread over gloo. Engines of both kinds take turns; `requests` of 64 tokens in and 48
out are queued at once, four times as many as may run. busy    CPU seconds of a stage's process over elapsed seconds
The last line is all figures as JSON.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.parallel.world import join_world
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.serve import Serve

_STAGES, _IN, _OUT = 2, 64, 48
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
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--waves", type=int, default=4, help="requests, as multiples of those that run at a time")
    given = parser.parse_args()
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as where:
        folder = save_model(build(_MODEL, dtype=torch.float32, device="cpu", seed=1), Path(where) / "m")
        processes = [
            start.Process(target=measure, args=(rank, folder, f"{where}/store", given)) for rank in range(_STAGES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert not any(process.exitcode for process in processes)


def measure(rank: int, folder: Path, store: str, given: argparse.Namespace) -> None:
    """On each rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_STAGES), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, _STAGES), rank=rank, world_size=_STAGES)
    kinds: dict[str, Callable[[LLM], None]] = {"one step": one_step, "a step each": lambda llm: None}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(given.repeats):
        for kind, change in kinds.items():
            found[kind].append(one_run(folder, change, given.running, given.running * given.waves))
    if not rank:
        rows = [{"in flight": kind} | middle(runs) for kind, runs in found.items()]
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        print(json.dumps(rows))
    dist.destroy_process_group()


def one_step(llm: LLM) -> None:
    """The engine as it would be without steps of different requests in flight."""
    loop, scheduler = llm.engine.loop, llm.engine.scheduler
    scheduler.settings = replace(scheduler.settings, num_stages=1)
    vars(loop)["_num_stages"] = 1


def one_run(folder: Path, change: Callable[[LLM], None], running: int, requests: int) -> dict[str, float]:
    """Tokens/s, and the busy shares of both stages."""
    table = Serve(pp=_STAGES, kv_bytes=100_000_000, max_running=running, dtype="fp32", threads=_STAGES)
    rng = Random(0)
    prompts = [[rng.randrange(2, _MODEL.vocab) for _ in range(_IN)] for _ in range(requests)]
    with join_world("cpu") as world, LLM(folder, table, world=world) as llm:
        change(llm)
        if world.rank:
            begin, busy = time.perf_counter(), time.process_time()
            llm.follow()
            share(busy, begin)
            return {}
        begin, busy = time.perf_counter(), time.process_time()
        params = SamplingParams(max_tokens=_OUT, temperature=0.0, ignore_eos=True)
        made = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        llm.close()
        assert all(len(each.tokens) == _OUT for each in made), made[0].error
        own = (time.process_time() - busy) / seconds
        return {"tokens_per_s": requests * _OUT / seconds, "first busy": own, "last busy": share(0.0, 0.0)}


def share(busy: float, begin: float) -> float:
    """The last stage's busy share, on both."""
    value = torch.tensor([(time.process_time() - busy) / (time.perf_counter() - begin) if begin else 0.0])
    dist.broadcast(value, src=_STAGES - 1)
    return float(value)


def middle(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {key: round(median(run[key] for run in runs), 3 if "busy" in key else 1) for key in runs[0]}


if __name__ == "__main__":
    main()
