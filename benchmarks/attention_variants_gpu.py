"""Attention variants beside dense attention on a GPU, in one run: each by its own FLOPs, as a share of the dense rate.

    python benchmarks/attention_variants_gpu.py [--limit SECONDS] [--only NAME …]

Dense is our own kernel and the library's (cuDNN) at 8k; variants are our own kernel only. Sinks with a window of 128
are bound by memory, so their share is of the time that their bytes take. The last line on stdout is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import torch

from armillary.kernels.attention import tiles
from armillary.kernels.attention.attention import ATTENTION, AttentionCase
from armillary.kernels.attention.tiles import AttentionTiles
from armillary.kernels.core.agreement import check, expect
from armillary.kernels.core.version_trial import input_sets, time_version

DENSE = AttentionCase(batch=1, length=8192, heads=32, kv_heads=8)
SHORT = replace(DENSE, batch=2, length=4096)
NARROW = replace(SHORT, batch=8, heads=64, head_dim=64, window=128, sinks=True)
CASES: dict[str, tuple[str, AttentionCase]] = {
    "dense, cuDNN": ("cudnn", DENSE),
    "dense": ("triton", DENSE),
    "dense 4k": ("triton", SHORT),
    "4 documents": ("triton", replace(SHORT, documents=4)),
    "8k in 4 documents": ("triton", replace(DENSE, documents=4)),
    "window 1024": ("triton", replace(SHORT, window=1024)),
    "block-sparse": ("triton", replace(SHORT, sparse=True)),
    "sinks, full": ("triton", replace(DENSE, sinks=True)),
    "dense, heads of 64": ("triton", replace(DENSE, heads=64, head_dim=64)),
    "sinks, window 128": ("triton", NARROW),
    "sinks, window 128, its own kernel": ("triton, narrow window", NARROW),
    "sinks, window 128, both ways": ("triton, narrow window both ways", NARROW),
}
MERGED = "triton, merged heads"
CASES |= {
    f"{name}, merged heads": (MERGED, CASES[name][1])
    for name in ("dense", "dense 4k", "4 documents", "8k in 4 documents", "window 1024", "block-sparse")
}
BOUND_BY_MEMORY = tuple(name for name in CASES if name.startswith("sinks, window 128"))
OTHER_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "8k in 4 documents, a stage less": ("8k in 4 documents", {"DOCUMENTS_AHEAD": False}),
    "4 documents, a stage less": ("4 documents", {"DOCUMENTS_AHEAD": False}),
    "sinks, window 128, two loops backward": ("sinks, window 128", {"ONE_LOOP_NARROW": False}),
    "sinks, window 128, a head per block": ("sinks, window 128", {"PACKED_NARROW": None}),
    **{
        f"sinks, window 128, {m} × {n}, {warps} warps": (
            "sinks, window 128",
            {"PACKED_NARROW": AttentionTiles(m, n, warps, stages, 0, pack=8)},
        )
        for m, n, warps, stages in ((128, 32, 8, 4), (128, 32, 8, 3), (64, 32, 4, 4), (128, 64, 8, 3))
    },
}
"""case -> what it is a variant of, and what of `tiles` is other than usual"""


def bytes_per_s() -> float:
    """Of a copy that fits no cache."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    b.copy_(a)
    marks[0].record()
    for _ in range(10):
        b.copy_(a)
    marks[1].record()
    torch.cuda.synchronize()
    return 20 * a.numel() / (marks[0].elapsed_time(marks[1]) / 1e3)


def agrees(version: str, case: AttentionCase) -> str:
    """On a shorter case, against a wider reference."""
    small = replace(case, batch=1, length=min(case.length, 1024))
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = ATTENTION.version(version)
    assert chosen is not None
    result = check(chosen.load(), ATTENTION, expect(ATTENTION, ATTENTION.inputs(small, generator), generator))
    return "yes" if result.agreed else result.why_not


def measured(name: str, copied: float) -> dict[str, Any]:
    version, case = CASES[name]
    chosen = ATTENTION.version(version)
    assert chosen is not None
    timed = time_version(chosen.load(), ATTENTION, input_sets(ATTENTION, case), budget_s=0.2, rest_s=0.1)
    work = ATTENTION.work(case)
    row = {
        "forward": round(work.flops / timed.forward_s / 1e12),
        "backward": round(work.backward_flops / (timed.backward_s or 1.0) / 1e12),
        "agrees": agrees(version, case),
    }
    if name in BOUND_BY_MEMORY:
        row["of_bytes"] = round(work.bytes / copied / timed.forward_s, 2)
        row["backward_of_bytes"] = round(work.backward_bytes / copied / (timed.backward_s or 1.0), 2)
    return row


def set_tiles(changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(tiles, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--only", nargs="+", choices=[*CASES, *OTHER_WAYS], metavar="NAME")
    given = parser.parse_args()
    end, copied, rows = time.monotonic() + given.limit, bytes_per_s(), dict[str, dict[str, Any]]()
    for name in given.only or (*CASES, *OTHER_WAYS):
        if time.monotonic() > end:
            break
        base, changes = OTHER_WAYS.get(name, (name, {}))
        usual = {each: getattr(tiles, each) for each in changes}
        try:
            set_tiles(changes)
            rows[name] = measured(base, copied)
        except Exception as error:  # the others are still worth knowing
            rows[name] = {"failed": f"{type(error).__name__} {str(error)[:160]}"}
        finally:
            set_tiles(usual)
        print(name, rows[name], flush=True)
    dense = rows.get("dense", {})
    for row in rows.values():
        if "forward" in row and "forward" in dense:
            row["of_dense"] = [round(row[way] / dense[way], 2) for way in ("forward", "backward")]
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_gb_s": round(copied / 1e9), "tflops": rows}))


if __name__ == "__main__":
    main()
