"""A layer of packed experts on this GPU, Qwen3-30B-A3B's, by format and number of tokens: by the kernel for few tokens,
by grouped GEMMs over codes, and dequantised first. All are compared before they are timed.

    python -m benchmarks.packed_experts_gpu [--only int4,mxfp4] [--limit SECONDS]

Which is taken where is `prefers_small` and `_DEQUANTISED_ROWS`: counted in bytes, and to be set by these figures.
Formats that would begin after --limit seconds are left out and named. The last line is the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.choose_version import choose
from armillary.kernels.moe import grouped_moe_triton
from armillary.kernels.moe.moe import GROUPED_MOE, SMALL_MOE, MoECase, MoEWeights
from armillary.kernels.moe.packed_stack import DEQUANTISE_STACK, StackCase
from armillary.kernels.moe.small_moe_triton import small_moe
from benchmarks.quantized_gpu import check, graph_seconds

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int4": {"packed": "int4", "group": 128},
    "fp8 blocks": {"packed": "fp8", "group": 128},
    "mxfp4": {"packed": "mxfp4", "group": 32},
    "int4 zeros": {"packed": "int4", "group": 128, "zeros": True},
}
TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096)
LAYERS = 4  # other weights for each call, more than the cache holds
_NEVER = 1 << 40


def case_of(name: str, tokens: int) -> MoECase:
    case = SMALL_MOE.cases["qwen3-30b-a3b 1"]
    assert isinstance(case, MoECase)
    return replace(case, tokens=tokens, norm=False, **FORMATS[name])


def prove(name: str) -> None:
    """Against plain torch, as an engine does when it starts."""
    case = case_of(name, 4)
    choices = [choose(op, case, deterministic=True) for op in (SMALL_MOE, GROUPED_MOE)]
    if case.packed:
        stack = StackCase(experts=2, rows=64, columns=2048, kind=case.packed, group=case.group, zeros=case.zeros)
        choices.append(choose(DEQUANTISE_STACK, stack, deterministic=True))
    for choice in choices:
        print(f"  {name}, {choice.op}: {choice.version} of {choice.candidates}", flush=True)
        assert choice.version != "eager", "no kernel agrees"


def runs_for(case: MoECase) -> dict[str, tuple[Callable[..., Tensor], int]]:
    """What can run so many tokens, and from how many rows per expert on it dequantises."""
    runs: dict[str, tuple[Callable[..., Tensor], int]] = {"grouped": (grouped_moe_triton.grouped_moe, _NEVER)}
    if case.tokens <= 8:
        runs["few"] = small_moe, _NEVER
    if case.packed and case.tokens >= 256:
        runs["dequantised"] = grouped_moe_triton.grouped_moe, 0
    return runs


def by_tokens(name: str, tokens: int, layers: list[MoEWeights]) -> dict[str, float]:
    """Microseconds per layer of each."""
    case, row, first = case_of(name, tokens), {}, None
    x = torch.randn(tokens, case.hidden, device="cuda", dtype=torch.bfloat16)
    for label, (run, rows) in runs_for(case).items():
        grouped_moe_triton._DEQUANTISED_ROWS = rows
        with torch.no_grad():
            result = run(x, layers[0], case.moe).float()
        first = result if first is None else first
        check(result, first, f"{name}, {tokens} tokens, {label}")
        calls = [lambda each=each, run=run: run(x, each, case.moe) for each in layers]  # type: ignore[misc]
        row[label] = round(1e6 * graph_seconds(calls, 5) / len(layers), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(FORMATS))
    parser.add_argument("--limit", type=float, default=240.0)
    arguments = parser.parse_args()
    begin, found = time.monotonic(), {}  # type: ignore[var-annotated]
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name in arguments.only.split(","):
        if time.monotonic() - begin > arguments.limit:
            print(f"  {name}: left out, {arguments.limit:.0f} s are over", flush=True)
            continue
        try:
            prove(name)
            generators = (torch.Generator("cuda").manual_seed(seed) for seed in range(LAYERS))
            layers = [SMALL_MOE.inputs(case_of(name, 1), generator)[1] for generator in generators]
            for tokens in TOKENS:
                found[f"{name}, {tokens} tokens"] = row = by_tokens(name, tokens, layers)
                print(f"| {name}, {tokens} tokens | {row} µs per layer |", flush=True)
            del layers
        except Exception:
            found[name] = traceback.format_exc()[-600:]
            print(found[name], flush=True)
        torch.cuda.empty_cache()
        print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
