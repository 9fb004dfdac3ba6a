"""LoRA adapters: decode throughput with a different adapter per row, over that of the base alone.

    python benchmarks/adapters.py llama-3.1-8b                                  # an H200, as docs/adapters.md says
    python benchmarks/adapters.py armillary-2m --device cpu --dtype fp32 --rows 8 --adapters 4 --tokens 16

Base and adapters have random weights, drawn on the device. One engine serves `--rows` requests at once, with adapters
on QKV and out, on all projections, and without; rounds with and without alternate, so that both see the same machine;
of each the median counts. Of CUDA graphs only those of the shapes that come are captured. The last line is all figures
as JSON, with seconds spent.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_setup import drawn

from armillary.engine.build import make_engine
from armillary.engine.engine import Engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.kernels.core.dtype import parse_dtype
from armillary.model.transformer import Transformer
from armillary.model.weights.adapter_folder import Adapter, AdapterMatrices, AdapterShape, adapter_shapes
from armillary.spec.tables.serve import Serve

CASES = {"qkv and out": ("qkv", "out"), "all projections": ("qkv", "out", "gate_up", "down")}


def random_adapter(shapes: list[AdapterShape], rank: int, like: torch.Tensor) -> Adapter:
    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=like.dtype, device=like.device).normal_(0.0, std)

    modules = {
        shape.name: AdapterMatrices(
            a_RK=normal(len(shape.heights) * rank, shape.inputs, shape.inputs**-0.5),
            b_Nr=normal(shape.outputs, rank, 0.01),
        )
        for shape in shapes
    }
    return Adapter(folder=Path(), rank=rank, modules=modules)


def make(model: Transformer, on: tuple[str, ...], given: argparse.Namespace) -> tuple[Engine, list[str]]:
    """An engine with its adapters, and their names."""
    serve = Serve(
        max_running=given.rows,
        max_model_len=given.prompt + given.tokens,
        prefix_cache=False,
        max_adapters=given.adapters,
        adapter_rank=given.rank,
        adapter_on=on,
    )
    engine, _ = make_engine(model, None, serve, seed=0, warm=False)
    assert engine.adapters is not None
    names, shapes = [f"a{number}" for number in range(given.adapters)], adapter_shapes(model.config, on)
    with torch.no_grad():
        for name in names:
            engine.adapters.add(name, random_adapter(shapes, given.rank, next(model.parameters())))
    return engine, names


def tokens_per_s(engine: Engine, prefix: str, given: argparse.Namespace, names: list[str]) -> float:
    """Of decode steps of all rows: once every row runs, and until the first ends."""
    params = SamplingParams(max_tokens=given.tokens, temperature=0.0, ignore_eos=True)
    for row in range(given.rows):
        name = names[row % len(names)] if names else ""
        ids = [(row * 31 + i) % 1000 for i in range(given.prompt)]
        engine.scheduler.submit(
            Request(id=f"{prefix}{row}", prompt=ids, params=params, adapter=name), engine.loop.clock()
        )
    table, totals = engine.scheduler.request_table, engine.scheduler.totals
    while any(seq.is_prefilling for seq in table.running) or table.waiting:
        engine.step()
    before, begin = totals.tokens_out, time.perf_counter()
    while len(table.running) == given.rows:
        engine.step()
    rate = (totals.tokens_out - before) / (time.perf_counter() - begin)
    while engine.busy:
        engine.step()
    return rate


def measured(engine: Engine, names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(given.rounds + 1):
        for adapted in (False, True):
            rate = tokens_per_s(engine, f"{number} {adapted} ", given, names if adapted else [])
            if number:  # the first is a warm-up
                rates[adapted].append(rate)
    shares = [with_ / without for with_, without in zip(rates[True], rates[False], strict=True)]
    return {
        "base_tokens_per_s": round(median(rates[False]), 1),
        "tokens_per_s": round(median(rates[True]), 1),
        "share": round(median(shares), 4),
        "shares": [round(share, 4) for share in shares],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look; shares change with their number")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    spent, say = stopwatch()
    model = drawn(given.model, given.device, parse_dtype(given.dtype), given.layers)
    say("base drawn")
    rows = []
    for case, on in CASES.items():
        engine, names = make(model, on, given)
        say(f"{case}: engine and adapters")
        row = {"case": case, "rows": given.rows, "adapters": given.adapters, "rank": given.rank}
        rows.append(row | measured(engine, names, given))
        say(json.dumps(rows[-1]))
        del engine
        gc.collect()  # an engine is a cycle; its cache is the memory of the next
        if given.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps({"model": given.model, "device": given.device, "seconds": spent(), "cases": rows}), flush=True)


def stopwatch() -> tuple[Callable[[], float], Callable[[str], None]]:
    """(seconds so far, a print that begins with them)"""
    begin = time.monotonic()

    def spent() -> float:
        return round(time.monotonic() - begin, 1)

    return spent, lambda text: print(f"{spent():6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
