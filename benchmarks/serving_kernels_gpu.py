"""Paged attention, QKV + cache write and sampling on one GPU: agreement, then bytes/s beside measured bandwidth.

Run with `python -m benchmarks.serving_kernels_gpu [PART …] [--warm]`; each case stands alone, so one that fails leaves
the others. `--warm` only compiles (parts may be warmed side by side). The last line is a table as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from armillary.kernels import logprobs, qkv_cache, sampling, sampling_triton
from armillary.kernels import paged_attention as paged
from armillary.kernels import paged_attention_triton as fast
from armillary.kernels import qkv_cache_triton as qkv_triton
from armillary.kernels.agree import check, expect
from armillary.kernels.op import Op
from armillary.kernels.timing import time_calls
from armillary.kernels.trial import input_sets

BEGAN = time.monotonic()
DEVICE = torch.device("cuda")
BUDGET_S = 0.05
TABLE: dict[str, Any] = {}


def note(name: str, value: Any) -> None:
    TABLE[name] = value
    print(f"{time.monotonic() - BEGAN:6.1f} s  {name}: {value}", file=sys.stderr, flush=True)


def tried(name: str, run: Callable[[], Any]) -> None:
    """Note what `run` returns, or how it failed."""
    try:
        note(name, run())
    except Exception as error:
        note(name, f"{type(error).__name__}: {str(error)[:160]}")


def seconds(calls: list[Callable[[], Any]], graph: bool | None = None) -> float:
    return time_calls(calls, DEVICE, budget_s=BUDGET_S, graph=graph).seconds


def bandwidth() -> tuple[float, float]:
    """Bytes/s of reading and of copying 4 GB."""
    row = torch.randn(1 << 30, device=DEVICE)
    other = torch.empty_like(row)
    read = row.nbytes / seconds([lambda: torch.sum(row)])
    return read, 2 * row.nbytes / seconds([lambda: other.copy_(row)])


def agreement(op: Op, case: Any) -> str:
    """Error of the Triton version against the wide reference; raises where it is too large."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    version = op.version("triton")
    assert version is not None
    why = version.refuses(case)
    if why:
        return f"refused: {why}"
    expected = expect(op, op.inputs(op.small(case), generator), generator)
    found = check(version.load(), op, expected, tolerance=op.tolerance.get(case.dtype))
    return f"{found.error:.1e}" if found.agreed else f"WRONG {found.why_not}"


def timed(op: Op, case: Any) -> float:
    run = op.version("triton").load()  # type: ignore[union-attr]
    sets = input_sets(op, case)
    return seconds([lambda inputs=inputs: run(*inputs) for inputs in sets], graph=True)


def share(op: Op, case: Any, roof: float) -> str:
    took = timed(op, case)
    return f"{took * 1e6:.1f} µs {op.work(case).bytes / took / roof:.3f}"


def flops(case: Any) -> str:
    took = timed(paged.PAGED_ATTENTION, case)
    return f"{took * 1e6:.0f} µs {paged.PAGED_ATTENTION.work(case).flops / took / 1e12:.0f} TF/s"


def flash(case: Any) -> str:
    """torch's attention on the same numbers in one piece; causal from the lower right corner, or it is not the same."""
    from torch.nn.attention.bias import causal_lower_right

    shape = (case.batch, case.heads, case.queries, case.head_dim)
    q = torch.randn(shape, device=DEVICE, dtype=case.torch_dtype)
    k, v = (torch.randn(case.batch, case.heads, case.context, case.head_dim, device=DEVICE, dtype=case.torch_dtype)
            for _ in range(2))  # fmt: skip
    bias = causal_lower_right(case.queries, case.context)
    took = seconds([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)])
    return f"{took * 1e6:.0f} µs {paged.PAGED_ATTENTION.work(case).flops / took / 1e12:.0f} TF/s"


def replayed() -> str:
    """One captured graph serves other lengths, tables and inactive rows."""
    case = paged.PagedCase(batch=6, context=3000, page=16)
    inputs = paged.PAGED_ATTENTION.inputs(case, torch.Generator(DEVICE).manual_seed(1))
    run = fast.paged_attention
    run(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs)
    worst = 0.0
    for lengths, counts in (([3000, 1, 17, 0, 999, 64], [1] * 6), ([5, 2500, 0, 1, 1, 3], [1, 1, 0, 1, 0, 1])):
        inputs[4].copy_(torch.tensor(lengths))
        inputs[3].copy_(torch.tensor([0, *counts]).cumsum(0))
        graph.replay()
        wide = paged.paged_attention(inputs[0].float(), inputs[1].float(), *inputs[2:])
        worst = max(worst, float((out - wide).norm() / wide.norm()))
    return f"{worst:.1e}"


def paged_agreement() -> None:
    case = paged.PagedCase(batch=5, context=700)
    for name, kind in {
        "bf16": case,
        "one row 2k": replace(case, batch=1, context=2048),
        "fp16 D80 all": replace(case, dtype="fp16", head_dim=80, window=100, softcap=20.0, sinks=True, slopes=True),
        "fp32 D256": replace(case, dtype="fp32", head_dim=256, page=32),
        "D96 page 48 q3": replace(case, head_dim=96, page=48, queries=3),
        "D64 group 5 prefill": replace(case, head_dim=64, heads=40, queries=300),
        "prefill window sinks": replace(case, queries=333, window=128, sinks=True),
        "prefill fp32": replace(case, dtype="fp32", queries=130, softcap=10.0),
        "prefill fp32 D256": replace(case, dtype="fp32", queries=70, head_dim=256),
        "prefill D256": replace(case, queries=200, head_dim=256, page=256),
    }.items():
        tried(f"ok {name}", lambda kind=kind: agreement(paged.PAGED_ATTENTION, kind))
    tried("ok graph", replayed)


def decode_speed(read: float) -> None:
    cases = {"d256x1k": paged.PagedCase(batch=256, context=1024),
             "d256x1k p64": paged.PagedCase(batch=256, context=1024, page=64),
             "d256x1k g2": paged.PagedCase(batch=256, context=1024, heads=16),
             "d256x1k k2": paged.PagedCase(batch=256, context=1024, heads=16, kv_heads=2),
             "d256x600r": paged.PagedCase(batch=256, context=1024, ragged=True, heads=16),
             "d256x4k ragged": paged.PagedCase(batch=256, context=4096, ragged=True),
             "d256x8k g8": paged.PagedCase(batch=256, context=8192, heads=64),
             "d1x32k": paged.PagedCase(batch=1, context=32768),
             "d1x32k g8": paged.PagedCase(batch=1, context=32768, heads=64),
             "d8x1k": paged.PagedCase(batch=8, context=1024)}  # fmt: skip
    for name, case in cases.items():
        tried(name, lambda case=case: share(paged.PAGED_ATTENTION, case, read))
    for name in ("d256x1k", "d1x32k"):
        tried(f"{name} sdpa", lambda name=name: contiguous(cases[name], read))


def contiguous(case: Any, read: float) -> str:
    """torch's attention for one query a row, keys and values in one piece."""
    kv = (case.batch, case.kv_heads, case.context, case.head_dim)
    q = torch.randn(case.batch, case.heads, 1, case.head_dim, device=DEVICE, dtype=case.torch_dtype)
    k, v = (torch.randn(kv, device=DEVICE).to(case.torch_dtype) for _ in range(2))
    took = seconds([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)], graph=True)
    return f"{took * 1e6:.1f} µs {paged.PAGED_ATTENTION.work(case).bytes / took / read:.3f}"


def prefill_speed(read: float) -> None:
    for name, case in {"p2k@16k": paged.PagedCase(batch=1, context=16384, queries=2048),
                       "p8k@8k": paged.PagedCase(batch=1, context=8192, queries=8192)}.items():  # fmt: skip
        tried(name, lambda case=case: flops(case))
        tried(f"{name} p128", lambda case=case: flops(replace(case, page=128)))
        tried(f"{name} sdpa", lambda case=case: flash(case))


def sweep(read: float) -> None:
    """Other tilings of the split kernel."""
    plain = fast.split_tiling
    cases = {"1k": paged.PagedCase(batch=256, context=1024), "32k": paged.PagedCase(batch=1, context=32768)}
    for n, stages, warps, workers in ((64, 3, 4, 3), (64, 3, 2, 2), (64, 3, 2, 3), (64, 4, 2, 2), (128, 3, 4, 1),
                                      (32, 4, 2, 4), (32, 5, 2, 3)):  # fmt: skip
        fast.split_tiling = lambda *args: replace(plain(*args), n=n, stages=stages, warps=warps, workers=workers)  # noqa: B023
        for name, case in cases.items():
            label = f"sweep {name} n{n} s{stages} w{warps} x{workers}"
            tried(label, lambda case=case: share(paged.PAGED_ATTENTION, case, read))
    fast.split_tiling = plain


def prefill_sweep(read: float) -> None:
    """Other tilings of the kernel for prompts."""
    plain, case = fast.prefill_tiling, paged.PagedCase(batch=1, context=8192, queries=8192)
    for m, n, warps, stages in ((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 128, 4, 3), (64, 32, 4, 4)):
        fast.prefill_tiling = lambda *args: replace(plain(*args), m=m, n=n, warps=warps, stages=stages)  # noqa: B023
        tried(f"p8k m{m} n{n} w{warps} s{stages}", lambda: flops(case))
    fast.prefill_tiling = plain


def qkv_agreement() -> None:
    cases = {
        "qkv": qkv_cache.QkvCase(tokens=4000),
        "qkv 1": qkv_cache.QkvCase(tokens=1),
        "qkv fp32 layer": qkv_cache.QkvCase(tokens=77, dtype="fp32", norm="layer", head_dim=80, rotary=40),
        "qkv interleaved": qkv_cache.QkvCase(tokens=4096, interleaved=True, rotary=64),
    }
    for name, case in cases.items():
        tried(f"ok {name}", lambda case=case: agreement(qkv_cache.QKV_CACHE, case))


def qkv_speed(copy: float) -> None:
    cases = dict(qkv_cache.QKV_CACHE.cases) | {"interleaved": qkv_cache.QkvCase(tokens=8192, interleaved=True)}
    for name, case in cases.items():
        tried(name, lambda case=case: share(qkv_cache.QKV_CACHE, case, copy))


def qkv_sweep(copy: float) -> None:
    """Other tilings of the cache write."""
    plain, case = qkv_triton.tiling, qkv_cache.QkvCase(tokens=16384)
    for sizes in ((1, 1), (4, 2), (8, 2), (16, 4), (16, 8), (32, 8), (4, 1)):
        qkv_triton.tiling = lambda *args: sizes  # noqa: B023
        tried(f"qkv {sizes}", lambda: share(qkv_cache.QKV_CACHE, case, copy))
    qkv_triton.tiling = plain


def sampling_agreement() -> None:
    for op in (sampling.SAMPLE, logprobs.LOGPROBS):
        for name, case in op.cases.items():
            tried(f"ok {name}", lambda op=op, case=case: agreement(op, case))
    tried("ok sample as on a CPU", as_on_cpu)


def sampling_speed(read: float) -> None:
    for op in (sampling.SAMPLE, logprobs.LOGPROBS):
        for name, case in op.cases.items():
            tried(name, lambda op=op, case=case: share(op, case, read))


def as_on_cpu() -> str:
    """Tokens of GPU and CPU, the same inputs."""
    case = sampling.SampleCase(batch=16, top_k=40, top_p=0.9, min_p=0.01, penalties=True, device="cpu")
    inputs = sampling.SAMPLE.inputs(case, torch.Generator().manual_seed(0))
    slow = sampling.sample(*inputs)
    quick = sampling.SAMPLE.version("triton").load()(*(x.to(DEVICE) for x in inputs))  # type: ignore[union-attr]
    return f"{int((quick.cpu() == slow).sum())} of {case.batch}"


def kernel_times(read: float) -> None:
    """Microseconds of each kernel of a few calls."""
    for op, case in ((sampling.SAMPLE, sampling.SampleCase(batch=256, top_k=50, top_p=0.95)),
                     (sampling.SAMPLE, sampling.SampleCase(batch=1, top_p=0.9)),
                     (paged.PAGED_ATTENTION, paged.PagedCase(batch=1, context=32768)),
                     (paged.PAGED_ATTENTION, paged.PagedCase(batch=8, context=1024))):  # fmt: skip
        tried(f"kernels {op.name} {case.batch}", lambda op=op, case=case: each_kernel(op, case))


def each_kernel(op: Op, case: Any) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    run, sets = op.version("triton").load(), input_sets(op, case)  # type: ignore[union-attr]
    run(*sets[0])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for inputs in sets:
            run(*inputs)
        torch.cuda.synchronize()
    return {event.key[:24]: round(event.device_time_total / event.count, 1) for event in seen.key_averages()}


def sampling_sweep(read: float) -> None:
    """Other pieces."""
    case = sampling.SampleCase(batch=256, top_k=50, top_p=0.95)
    for block, warps in ((4096, 4), (8192, 8), (2048, 4), (8192, 16)):
        sampling_triton._BLOCK, sampling_triton._WARPS = block, warps
        tried(f"sample {block} {warps}", lambda: share(sampling.SAMPLE, case, read))


AGREEMENT = {"agree_paged": paged_agreement, "agree_qkv": qkv_agreement, "agree_sampling": sampling_agreement}
READING = {"decode": decode_speed, "prefill": prefill_speed, "sampling": sampling_speed, "sweep": sweep,
           "prefill_sweep": prefill_sweep, "kernels": kernel_times, "sampling_sweep": sampling_sweep}  # fmt: skip
COPYING = {"qkv": qkv_speed, "qkv_sweep": qkv_sweep}


def main(parts: list[str]) -> None:
    wanted = parts or [*AGREEMENT, *READING, *COPYING]
    for name in AGREEMENT.keys() & set(wanted):
        AGREEMENT[name]()
    if not (READING | COPYING).keys() & set(wanted):
        return
    read, copy = bandwidth()
    note("read TB/s", round(read / 1e12, 3))
    note("copy TB/s", round(copy / 1e12, 3))
    for name in wanted:
        if name in READING:
            READING[name](read)
        elif name in COPYING:
            COPYING[name](copy)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a time limit leaves what was measured
    if "--warm" in sys.argv:
        BUDGET_S = 0.001
    try:
        main([part for part in sys.argv[1:] if part != "--warm"])
    finally:
        print(json.dumps(TABLE, ensure_ascii=False))
