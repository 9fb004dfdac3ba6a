"""Latent attention on one GPU: decode of 64 sequences × 8k at 16 and 128 heads, prefill chunks and the cache write,
each as a share of the ceilings measured in the same run.

    python -m benchmarks.latent_attention_gpu [--sweep] [--limit SECONDS]

Every kernel is compared with the plain reference in a wider dtype first. Times are medians from CUDA graphs on random
inputs past L2. `read %` is the compulsory bytes over read bandwidth, `gemm %` the FLOPs over the bf16 GEMM rate; the
larger of the two is what bounds a shape. `--sweep` tries other tiles of the decode kernels. JSON comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.core.op import Case, Op
from armillary.kernels.core.version_trial import input_sets, time_version
from armillary.kernels.latent import latent_decode_triton
from armillary.kernels.latent.latent_decode import LATENT_DECODE, LatentCase
from armillary.kernels.latent.latent_decode_triton import LatentTiling
from armillary.kernels.latent.latent_prefill import LATENT_PREFILL
from armillary.kernels.latent.latent_to_cache import LATENT_TO_CACHE
from armillary.profiling.ceilings.settings import settings_for
from armillary.profiling.kernel_bench.bench import measure_some

CUDA = torch.device("cuda")
TILINGS = {
    16: [
        LatentTiling(m=16, n=32, warps=4, stages=3, workers=2),
        LatentTiling(m=16, n=32, warps=4, stages=5, workers=1),
        LatentTiling(m=16, n=64, warps=8, stages=3, workers=1),
        LatentTiling(m=16, n=64, warps=4, stages=2, workers=2),
        LatentTiling(m=16, n=16, warps=4, stages=4, workers=2),
        LatentTiling(m=16, n=32, warps=8, stages=3, workers=2),
    ],
    32: [
        LatentTiling(m=32, n=32, warps=8, stages=4, workers=1),
        LatentTiling(m=32, n=64, warps=8, stages=3, workers=1),
        LatentTiling(m=64, n=64, warps=8, stages=2, workers=1, warpgroups=True),
    ],
    128: [
        LatentTiling(m=64, n=64, warps=8, stages=2, workers=1, tiles=2, warpgroups=True),
        LatentTiling(m=64, n=32, warps=8, stages=3, workers=1, tiles=2),
    ],
}


def agreement(op: Op, case: Case) -> str:
    generator = torch.Generator(CUDA).manual_seed(1)
    version = op.version("triton")
    assert version is not None
    found = check(version.load(), op, expect(op, op.inputs(op.small(case), generator), generator))
    return f"{found.error:.1e}" if found.agreed else found.why_not


def timed(op: Op, case: Case, ceilings: dict[str, float]) -> dict[str, Any]:
    """Microseconds and shares of the ceilings."""
    version = op.version("triton")
    assert version is not None
    seconds = time_version(version.load(), op, input_sets(op, case), budget_s=0.1).forward_s
    torch.cuda.empty_cache()
    work = op.work(case)
    return {
        "µs": round(seconds * 1e6, 1),
        "read %": round(100 * work.bytes / seconds / ceilings["read"], 1),
        "gemm %": round(100 * work.flops / seconds / ceilings["gemm"], 1),
    }


def shapes() -> Iterator[tuple[Op, str, Case]]:
    yield from ((LATENT_DECODE, name, case) for name, case in LATENT_DECODE.cases.items())
    for page in (16, 128):
        yield LATENT_DECODE, f"16 heads, pages of {page}", LatentCase(batch=64, context=8192, page=page)
        yield LATENT_DECODE, f"128 heads, pages of {page}", LatentCase(batch=64, context=8192, heads=128, page=page)
    yield LATENT_DECODE, "32 heads, 64 × 8k", LatentCase(batch=64, context=8192, heads=32)
    yield LATENT_DECODE, "128 heads, fp16", LatentCase(batch=64, context=8192, heads=128, dtype="fp16")
    for op in (LATENT_PREFILL, LATENT_TO_CACHE):
        yield from ((op, name, case) for name, case in op.cases.items() if op.version("triton") is not None)


def sweep(ceilings: dict[str, float]) -> Iterator[tuple[str, Any]]:
    """Decode of 64 × 8k with other tiles."""
    for heads, tilings in TILINGS.items():
        case = LatentCase(batch=64, context=8192, heads=heads)
        for tiling in tilings:
            name = f"{heads} heads, {tiling.m} × {tiling.n}, {tiling.warps} warps, {tiling.stages} stages"
            name += f", {tiling.workers} per SM{', warpgroups' if tiling.warpgroups else ''}"
            with patch.object(latent_decode_triton, "split_tiling", lambda *sizes, tiling=tiling: replace(tiling)):
                yield name, attempt(LATENT_DECODE, case, ceilings)


def attempt(op: Op, case: Case, ceilings: dict[str, float]) -> dict[str, Any] | str:
    try:
        return {"error": agreement(op, case)} | timed(op, case, ceilings)
    except Exception as error:  # one that fails must not cost the others
        return f"{type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--limit", type=float, default=230.0)
    arguments, begin = parser.parse_args(), time.monotonic()
    ceilings = measure_some(settings_for(CUDA, quick=True), {"read", "gemm"})
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(CUDA),
        "read TB/s": round(ceilings["read"] / 1e12, 3),
        "gemm TFLOP/s": round(ceilings["gemm"] / 1e12, 1),
    }
    rows: Iterator[tuple[str, Any]] = (
        (f"{op.name}: {name}", attempt(op, case, ceilings)) for op, name, case in shapes()
    )
    for source in (rows, sweep(ceilings) if arguments.sweep else ()):
        for name, result in source:
            found[name] = result
            print(f"{time.monotonic() - begin:.0f} s {name}: {result}", file=sys.stderr, flush=True)
            if time.monotonic() - begin > arguments.limit:
                break
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
