"""Kernels written for Hopper, on a GPU: each part in a process of its own, so that one that hangs or does not compile
leaves the others; agreement first, then speed.

    python benchmarks/hopper_gpu.py [FOLDER] [--part NAME …] [--limit SECONDS]

Parts compile at the same time and use the GPU one after the other, for at most 40 s each. FOLDER gets hopper.json and
hopper.log. The last line on stdout is one line of JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

GPU_SECONDS = 40


def gemm(**tiles: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from gemm_gpu import agreement, epilogues, multiplied, operands, speeds

        from armillary.kernels.gemm.large_linear_wgmma import LinearTiles

        residual = "residual" in tiles
        chosen = None if residual else LinearTiles(**tiles)
        compile_first(lambda: multiplied(*operands(8, 8, 8), tiles=chosen))
        use_gpu()
        found: dict[str, Any] = {"agrees": agreement(chosen, residual=residual)}
        note(found)
        return found | (epilogues() if residual else speeds(chosen))

    return run


def forward(keys: int, stages: int, ping_pong: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from armillary.kernels.simplicial import wgmma

        wgmma.FORWARD_TILES = wgmma.ForwardTiles(keys, stages, ping_pong)
        return simplicial({"forward"}, "forward")

    return run


def second(stages: int, registers: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from armillary.kernels.simplicial import wgmma

        wgmma.SECOND_TILES = wgmma.SecondTiles(stages, registers)
        return simplicial({"second"}, "second")

    return run


def query(key_stages: int, value_stages: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from armillary.kernels.simplicial import wgmma

        wgmma.QUERY_TILES = wgmma.QueryTiles(64, key_stages, value_stages)
        return simplicial({"query"}, "query")

    return run


def simplicial(kernels: set[str], timed: str) -> dict[str, Any]:
    """Agreement with fp64 forward and backward, then TFLOP/s of one kernel and of its pass at the published shape."""
    import torch
    from simplicial_gpu import PUBLISHED, SHARE, runs_of, seconds

    from armillary.kernels.core.agreement import check, expect
    from armillary.kernels.simplicial import simplicial_triton as launches
    from armillary.kernels.simplicial import tiles
    from armillary.kernels.simplicial.simplicial import SIMPLICIAL, SimplicialCase

    tiles.HOPPER_KERNELS = kernels
    plain = {"heads": 128, "kv_heads": 1, "documents": 0}
    cases = {
        "128 heads": SimplicialCase(batch=1, length=130, window_1=6, window_2=70, **plain),
        "whole windows": SimplicialCase(batch=2, length=301, window_1=5, window_2=130, **plain),
        "2 kv heads": SimplicialCase(
            batch=2, length=150, window_1=3, window_2=129, **plain | {"heads": 256, "kv_heads": 2}
        ),
        "documents": SimplicialCase(batch=2, length=121, window_1=6, window_2=33, **plain | {"documents": 3}),
    }
    if not kernels:
        cases = {}
    version = SIMPLICIAL.version("triton, Hopper")
    assert version is not None
    for case in (PUBLISHED, *cases.values()):
        q, k = (
            torch.empty(case.batch, case.length, n, 128, dtype=torch.bfloat16, device="cuda")
            for n in (case.heads, 2 * case.kv_heads)
        )
        documents = torch.zeros(case.batch, case.length, dtype=torch.int32, device="cuda") if case.documents else None
        masks, lse = (documents, 0.1, case.window_1, case.window_2, True), torch.zeros(q.shape[:3], device="cuda")
        compile_first(partial(launches._simplicial, q, k, k, *masks))
        compile_first(partial(launches._simplicial_backward, q, q, lse, q, k, k, *masks))
    use_gpu()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        generator = torch.Generator("cuda").manual_seed(0)
        result = check(version.load(), SIMPLICIAL, expect(SIMPLICIAL, SIMPLICIAL.inputs(case, generator), generator))
        found[name] = f"{result.error:.2g}" if result.agreed else f"NO: {result.why_not}"
        note(found)
    flops, runs = SIMPLICIAL.work(PUBLISHED).flops, runs_of(PUBLISHED, hopper=True)
    rates = {name: round(SHARE.get(name, 3.0) * flops / seconds(runs[name], 3) / 1e12) for name in (timed, "backward")}
    return found | rates


def attention(name: str) -> Callable[[], dict[str, Any]]:
    """A case of attention_variants_gpu.py, where a kernel that hangs would take the others with it."""

    def run() -> dict[str, Any]:
        from attention_variants_gpu import bytes_per_s, measured

        use_gpu()
        return measured(name, bytes_per_s())

    return run


def guide() -> dict[str, Any]:
    from tensor_core_guide import measured

    use_gpu()
    return measured()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "gemm 2 × 4, halves": gemm(),
    "gemm 2 × 3": gemm(stages=3, split=1),
    "gemm 1 × 4, halves": gemm(consumers=1),
    "gemm 2 × 4, groups of 16": gemm(group=16),
    "gemm 3 × 3, 192 rows": gemm(rows=192, consumers=3, stages=3),
    "gemm 3 × 3, 192 rows, groups of 16": gemm(rows=192, consumers=3, stages=3, group=16),
    "gemm 192 rows, stream-K, groups of 16": gemm(rows=192, consumers=3, stages=3, group=16, stream=True),
    "gemm 192 rows, stream-K": gemm(rows=192, consumers=3, stages=3, stream=True),
    "gemm 2 × 6, 128 columns": gemm(columns=128, stages=6, split=1),
    "gemm residual": gemm(residual=1),
    "forward 128, free": forward(128, 2, 0),
    "forward 128, scores ping-pong": forward(128, 2, 1),
    "forward 128, all ping-pong": forward(128, 2, 2),
    "forward 64, free": forward(64, 4, 0),
    "second 3 × 224": second(3, 224),
    "second 2 × 224": second(2, 224),
    "query 3 and 2": query(3, 2),
    **{
        name: attention(name)
        for name in ("sinks, window 128", "sinks, window 128, its own kernel", "sinks, window 128, both ways")
    },
    "guide": guide,
    "all three": lambda: simplicial({"forward", "query", "second"}, "forward"),
    "triton": lambda: simplicial(set(), "forward"),
}


# --- a part's own process


def compile_first(call: Callable[[], object]) -> None:
    """Compile what `call` launches, without running it."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **rest: run(self, *args, warmup=True, **rest)
    try:
        call()
    finally:
        JITFunction.run = run


LOCK: list[Any] = []


def use_gpu() -> None:
    """Wait until no other part uses the GPU; from then on the part has 40 s to live."""
    fcntl.flock(LOCK[0], fcntl.LOCK_EX)
    signal.alarm(GPU_SECONDS)


def note(found: dict[str, Any]) -> None:
    print(json.dumps(found, ensure_ascii=False), flush=True)


# --- all of them


def collect(running: dict[str, subprocess.Popen[str]], logs: dict[str, Path], limit_s: float) -> dict[str, Any]:
    end, found = time.monotonic() + limit_s, {}
    for name, process in running.items():
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines = logs[name].read_text().strip().splitlines()
        results = [line for line in lines if line.startswith("{")]
        found[name] = json.loads(results[-1]) if results else {}
        if process.returncode:
            found[name]["FAILED"] = process.returncode
            print(f"--- {name}: exit status {process.returncode}", *lines[-15:], sep="\n", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--limit", type=float, default=190.0)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lock is not None:
        LOCK.append(given.lock.open("w"))
        note(PARTS[given.part[0]]())
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    wanted = given.part or list(PARTS)
    temporary = Path(tempfile.mkdtemp())
    logs = {name: temporary / f"{i}.log" for i, name in enumerate(wanted)}
    command = [sys.executable, __file__, "--lock", str(temporary / "lock"), "--part"]
    running = {
        name: subprocess.Popen([*command, name], stdout=logs[name].open("w"), stderr=subprocess.STDOUT, text=True)
        for name in wanted
    }
    found = collect(running, logs, given.limit)
    (folder / "hopper.log").write_text("\n".join(f"--- {name}\n{log.read_text()}" for name, log in logs.items()))
    (folder / "hopper.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
