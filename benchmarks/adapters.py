"""LoRA adapters: decode throughput with a different adapter per row, over that of the base alone.

    python benchmarks/adapters.py llama-3.1-8b --device cuda --dtype bf16        # as docs/adapters.md reports it
    python benchmarks/adapters.py armillary-2m --device cpu --dtype fp32 --rows 8 --adapters 4 --tokens 16

Random weights. One engine serves `--rows` requests at once, with adapters on QKV and out, on all projections, and
without; rounds with and without alternate, so that both see the same machine; of each the median counts.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from armillary.engine.build import make_engine
from armillary.engine.engine import Engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.kernels.core.dtype import parse_dtype
from armillary.model.transformer import build
from armillary.model.weights.adapter_folder import Adapter, AdapterMatrices, adapter_shapes
from armillary.spec import catalogue
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve

CASES = {"qkv and out": ("attention.qkv", "attention.out"), "all projections": ()}


def random_adapter(config: ModelConfig, rank: int, seed: int, on: tuple[str, ...]) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    modules = {
        shape.name: AdapterMatrices(
            a_RK=torch.randn(len(shape.heights) * rank, shape.inputs, generator=generator) * shape.inputs**-0.5,
            b_Nr=torch.randn(shape.outputs, rank, generator=generator) * 0.01,
        )
        for shape in adapter_shapes(config)
        if not on or shape.name.endswith(on)
    }
    return Adapter(folder=Path(), rank=rank, modules=modules)


def tokens_per_s(engine: Engine, prefix: str, rows: int, prompt: int, tokens: int, names: list[str]) -> float:
    """Of decode steps alone, once every row runs."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        name = names[row % len(names)] if names else ""
        ids = [(row * 31 + i) % 1000 for i in range(prompt)]
        engine.scheduler.submit(
            Request(id=f"{prefix}{row}", prompt=ids, params=params, adapter=name), engine.loop.clock()
        )
    while (
        any(seq.is_prefilling for seq in engine.scheduler.request_table.running)
        or engine.scheduler.request_table.waiting
    ):
        engine.step()
    before, begin = engine.scheduler.totals.tokens_out, time.perf_counter()
    while engine.busy:
        engine.step()
    return (engine.scheduler.totals.tokens_out - before) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    config = catalogue.model(given.model).config
    for case, on in CASES.items():
        model = build(config, dtype=parse_dtype(given.dtype), device=given.device, seed=1)
        serve = Serve(
            max_running=given.rows,
            max_model_len=given.prompt + given.tokens,
            prefix_cache=False,
            max_adapters=given.adapters,
            adapter_rank=given.rank,
        )
        engine, _ = make_engine(model, None, serve, seed=0, owns_model=True)
        assert engine.adapters is not None
        names = [f"a{number}" for number in range(given.adapters)]
        for number, name in enumerate(names):
            engine.adapters.add(name, random_adapter(config, given.rank, number, on))
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(given.rounds + 1):
            for adapted in (False, True):
                chosen, prefix = names if adapted else [], f"{number} {adapted} "
                rate = tokens_per_s(engine, prefix, given.rows, given.prompt, given.tokens, chosen)
                if number:  # the first is a warm-up
                    rates[adapted].append(rate)
        shares = [with_ / without for with_, without in zip(rates[True], rates[False], strict=True)]
        row = {"case": case, "rows": given.rows, "adapters": given.adapters, "rank": given.rank}
        figures = {"base_tokens_per_s": median(rates[False]), "tokens_per_s": median(rates[True])}
        print(json.dumps(row | figures | {"share": median(shares)}), flush=True)
        del engine, model


if __name__ == "__main__":
    main()
