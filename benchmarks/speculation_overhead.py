"""What speculation costs where it does not pay: engine steps with 64 decoding requests, with and without it in turns.

    python benchmarks/speculation_overhead.py [--steps 300] [--repeats 3] [--only plain,draft,ngram]

Two engines of one process have the same requests and take turns step by step, the first of a pair alternating, so that
both see the same machine. Of every pair the wall time and the CPU time of the process are compared; a row is the median
of the ratios with its 95 % confidence interval (bootstrap over blocks of pairs, as neighbours are alike). The first row
compares two engines without speculation: what the method itself can tell. Weights are random, so nothing is accepted
and drafts never pay; steps in which something was drafted (the controller's trials) count too.
"""

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from speculation import Models, texts_to_write
from speculation_models import DRAFT, TARGET, VOCAB, question

from armillary.engine.engine import Engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model

_ROWS, _WARM, _BLOCK, _SAMPLES = 64, 24, 10, 2000
SMALL = replace(TARGET, ffn=768, layers=TARGET.layers[:6])
"""what the host does is a larger share of its short steps than of a large model's"""


def write_models(folder: Path) -> None:
    """Target and draft with random weights."""
    rng = random.Random(0)
    train_tokenizer(["".join(question(rng)) for _ in range(300)], VOCAB).save(folder / "tokenizer")
    for seed, config in enumerate((SMALL, DRAFT)):
        model = build(config, dtype=torch.float32, device="cpu", seed=seed)
        save_model(model, folder / config.name, template=folder / "tokenizer", overwrite=True)


def decoding(models: Models, drafts: str, tokens: int) -> Engine:
    """An engine in which all requests decode."""
    llm = models.opened(drafts, _ROWS)
    assert llm.tokenizer is not None
    engine = llm.engine
    for number, text in enumerate(texts_to_write(_ROWS)):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.scheduler.submit(
            Request(id=str(number), prompt=llm.tokenizer.encode(text), params=params), engine.loop.clock()
        )
    table = engine.scheduler.request_table
    while table.waiting or any(not seq.num_output for seq in table.running):
        engine.step()
    return engine


def step_s(engine: Engine) -> tuple[float, float]:
    """Wall and CPU seconds of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def interval(ratios: list[float], seed: int = 0) -> tuple[float, float]:
    """Of the median, 95 %."""
    blocks = [ratios[i : i + _BLOCK] for i in range(0, len(ratios), _BLOCK)]
    rng = random.Random(seed)
    medians = sorted(
        median(ratio for block in rng.choices(blocks, k=len(blocks)) for ratio in block) for _ in range(_SAMPLES)
    )
    return medians[int(0.025 * _SAMPLES)], medians[int(0.975 * _SAMPLES)]


def compared(models: Models, drafts: str, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds with over seconds without."""
    walls, cpus, drafted = list[float](), list[float](), 0
    for _ in range(repeats):
        plain, other = (decoding(models, name, steps + _WARM + 40) for name in ("plain", drafts))
        before = other.scheduler.totals.drafted
        for number in range(_WARM + steps):
            pair = (plain, other) if number % 2 else (other, plain)
            taken = {id(engine): step_s(engine) for engine in pair}
            if number >= _WARM:
                (wall, cpu), (wall_plain, cpu_plain) = taken[id(other)], taken[id(plain)]
                walls.append(wall / wall_plain)
                cpus.append(cpu / cpu_plain)
        drafted += other.scheduler.totals.drafted - before
    return {
        "case": f"{_ROWS} at once, {drafts}",
        "pairs": len(walls),
        "drafted": drafted,
        "wall": median(walls),
        "wall_95": interval(walls),
        "cpu": median(cpus),
        "cpu_95": interval(cpus),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="plain,draft,ngram")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        models = Models(folder=Path(folder), device="cpu", dtype="fp32")
        for drafts in given.only.split(","):
            row = compared(models, drafts, given.steps, given.repeats)
            low, high = row["wall_95"]
            cpu_low, cpu_high = row["cpu_95"]
            print(
                f"{row['case']}: wall × {row['wall']:.4f} ({low:.4f} to {high:.4f}), CPU × {row['cpu']:.4f} "
                f"({cpu_low:.4f} to {cpu_high:.4f}), {row['pairs']} pairs, {row['drafted']} drafted, "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
