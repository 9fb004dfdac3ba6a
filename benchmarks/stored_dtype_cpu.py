"""Decode rate of one model stored in bf16 and in fp32, in turns, as `serve.dtype = "auto"` loads it on this CPU.

`python benchmarks/stored_dtype_cpu.py [--model armillary-25m] [--rounds 3]`. A CPU without bf16 units must not pay for
what a checkpoint is stored in: the last line is a JSON table with the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.executor import FastExecutor
from armillary.machine.device_name import device_name
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.spec.catalogue import models
from armillary.spec.tables.serve import Serve

STORED = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCAB, PROMPT, TOKENS = 4096, 32, 64


def cache_dtype(llm: LLM) -> torch.dtype:
    executor = llm.engine.loop.executor
    assert isinstance(executor, FastExecutor)
    return executor.rows.blocks.dtype


def decode_rate(llm: LLM, rows: int) -> float:
    """Tokens/s of `rows` answers at once, prompts taken off by answers of two lengths."""
    prompts = [[(row * 31 + at * 7) % VOCAB for at in range(PROMPT)] for row in range(rows)]
    seconds = []
    for tokens in (TOKENS // 4, TOKENS):
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        seconds.append(time.perf_counter() - begin)
    return rows * (TOKENS - TOKENS // 4) / (seconds[1] - seconds[0])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--model", default="armillary-25m")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    given = asked.parse_args()
    config = replace(models()[given.model].config, vocab=VOCAB)
    serve = Serve(max_model_len=256, kv_bytes=200_000_000, max_running=8, prefix_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        loaded = {}
        for name, dtype in STORED.items():
            path = save_model(build(config, dtype=dtype, device="cpu", seed=0), Path(folder) / name)
            loaded[name] = LLM(path, serve, device="cpu")
        rates: dict[tuple[str, int], list[float]] = {}
        for _ in range(given.rounds):
            for rows in given.rows:
                for name, llm in loaded.items():
                    rates.setdefault((name, rows), []).append(decode_rate(llm, rows))
        dtypes = {name: str(cache_dtype(llm)) for name, llm in loaded.items()}
    table = {
        f"{rows} rows": {
            **{name: round(median(rates[name, rows]), 1) for name in STORED},
            "bf16 over fp32": round(median(rates["bf16", rows]) / median(rates["fp32", rows]), 3),
        }
        for rows in given.rows
    }
    found = {"device": device_name("cpu"), "model": given.model, "computed in": dtypes, "tokens_per_s": table}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
