"""Linear + cross-entropy, attention, small matmuls and fp8 products on one GPU: agreement, then time against ceilings
measured in the same run. `python benchmarks/matmul_kernels_gpu.py [section …]`; results as JSON on the last line."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from armillary.kernels.agree import check, expect
from armillary.kernels.ops import find_op
from armillary.kernels.timing import time_calls

CUDA = torch.device("cuda")
RESULTS: dict[str, Any] = {}
WARM = "--warm" in sys.argv
BEGAN = time.monotonic()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def seconds(
    *calls: Callable[[], object], budget_s: float = 0.3, rest_s: float = 0.03, graph: bool | None = None
) -> float:
    """Median of one call; long calls have rests between bursts, as the ceilings have."""
    if WARM:
        for call in calls[:1]:
            call()
        torch.cuda.synchronize()
        return 1.0
    return time_calls(list(calls), CUDA, budget_s=budget_s, rest_s=rest_s, graph=graph).seconds


def note(key: str, value: Any) -> None:
    RESULTS[key] = value
    if not WARM:
        print(f"{time.monotonic() - BEGAN:6.1f} {key}: {value}", file=sys.stderr, flush=True)


def attempt(key: str, work: Callable[[], Any]) -> Any:
    try:
        result = work()
        if result is not None:
            note(key, result)
        return result
    except Exception as error:
        note(key, f"FAILED {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}")
        traceback.print_exc(file=sys.stderr)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


# --- ceilings


def ceilings() -> None:
    a, b = normal(8192, 8192), normal(8192, 8192)
    attempt("gemm_tflops", lambda: round(2 * 8192**3 / seconds(lambda: a @ b, budget_s=1.0) / 1e12, 1))
    attempt("gemm_sustained", lambda: round(2 * 8192**3 / seconds(lambda: a @ b, budget_s=1.0, rest_s=0) / 1e12, 1))
    rows = [torch.randn(1 << 28, device=CUDA) for _ in range(3)]
    out = torch.empty_like(rows[0])
    attempt("read_gbps", lambda: round(2**30 / seconds(*[lambda r=r: torch.sum(r) for r in rows]) / 1e9))
    attempt("copy_gbps", lambda: round(2**31 / seconds(*[lambda r=r: out.copy_(r) for r in rows]) / 1e9))
    parts = [rows[0][i << 25 : ((i << 25) + 29360128)] for i in range(8)]  # as large as the small matmuls' weight
    one = [lambda p=p: torch.sum(p) for p in parts]
    attempt("read_117mb_gbps", lambda: round(29360128 * 4 / seconds(*one, rest_s=0, graph=True) / 1e9))


# --- agreement


def agreement() -> None:
    for name in ("linear_cross_entropy", "attention", "small_linear", "fp8_linear"):
        op = find_op(name)
        for label, case in op.cases.items():
            attempt(f"agree {name} {label}", lambda op=op, case=case: agrees(op, case))


def agrees(op: Any, case: Any) -> str | None:
    small = op.small(case)
    generator = torch.Generator(CUDA).manual_seed(3)
    expected = expect(op, op.inputs(small, generator), generator)
    found = []
    for version in op.versions:
        if version.refuses(case) or version.name == "compile":
            continue
        try:
            result = check(version.load(), op, expected, tolerance=op.tolerance.get(case.dtype))
            found.append(f"{version.name} {result.error:.1e}{'' if result.agreed else ' OFF ' + result.why_not}")
        except Exception as error:
            found.append(f"{version.name} FAILED {str(error).splitlines()[0][:100] if str(error) else error!r}")
    return "; ".join([*found, f"plain {max(expected.plain):.1e}"])


# --- linear + cross-entropy


def loss() -> None:
    from armillary.kernels.linear_cross_entropy_chunked import chunked
    from armillary.kernels.linear_cross_entropy_triton import to_gradient_

    op = find_op("linear_cross_entropy")
    for name in ("8k", "16k", "32k", "gemma-2-9b", "gpt2"):
        attempt(f"loss {name}", lambda name=name: loss_case(op, op.cases[name], chunked))
    attempt("loss 8k compile", lambda: loss_case(op, op.cases["8k"], op.version("compile").load()))
    z, targets = normal(8192, 131072), torch.randint(0, 131072, (8192,), device=CUDA)
    losses = torch.empty(8192, device=CUDA)
    for warps, stages in ((32, 3), (32, 5), (16, 3), (16, 5)):
        def step(warps: int = warps, stages: int = stages) -> None:
            to_gradient_(z, targets, losses, -100, 0.0, 1.0, write=True, warps=warps, stages=stages)

        attempt(f"elementwise w{warps} s{stages} ms", lambda step=step: round(seconds(step) * 1e3, 3))


def products() -> None:
    """The three matrix products of linear + cross-entropy alone."""
    from armillary.kernels.linear_cross_entropy_chunked import _add_product_

    z, x, w = normal(8192, 131072, scale=1e-2), normal(8192, 4096), normal(131072, 4096)
    flops = 2 * 8192 * 4096 * 131072
    total, half = torch.empty(131072, 4096, device=CUDA), torch.empty(131072, 4096, device=CUDA, dtype=x.dtype)
    dx = torch.empty_like(x)
    for key, call in {
        "logits": lambda: torch.mm(x, w.t(), out=z),
        "dx": lambda: torch.mm(z, w, out=dx),
        "dw half": lambda: torch.mm(z.t(), x, out=half),
        "dw fp32": lambda: _add_product_(total, z.t(), x, first=True),
        "dw fp32 added": lambda: _add_product_(total, z.t(), x, first=False),
    }.items():
        attempt(f"product {key} tflops", lambda call=call: round(flops / seconds(call) / 1e12, 1))


def loss_case(op: Any, case: Any, run: Callable[..., Any]) -> dict[str, float] | None:
    inputs = op.inputs(case, torch.Generator(CUDA).manual_seed(0))
    x, w = inputs[0].requires_grad_(), inputs[1].requires_grad_()

    def step() -> None:
        torch.autograd.grad(run(*inputs), (x, w))

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra = torch.cuda.max_memory_allocated() - before - 2 * x.numel() - (2 + 4) * w.numel()
    spent = seconds(step, budget_s=1.0, rest_s=0.1)
    flops = 6 * case.tokens * case.hidden * case.vocab
    return {"ms": round(spent * 1e3, 2), "tflops": round(flops / spent / 1e12, 1), "extra_gb": round(extra / 1e9, 2)}


# --- small matmuls


def small() -> None:
    from armillary.kernels.small_linear_triton import run_tiles

    for outputs, inputs in ((14336, 4096), (4096, 14336)):
        weights = [normal(outputs, inputs, scale=0.02) for _ in range(4)]
        for tokens in (1, 8, 32):
            x = normal(tokens, inputs)
            nbytes = 2 * (outputs * inputs + tokens * (inputs + outputs))

            def rate(run: Callable[..., Any], x: torch.Tensor = x, weights: Any = weights, n: int = nbytes) -> int:
                calls = [lambda w=w: run(x, w) for w in weights]
                return round(n / seconds(*calls, budget_s=0.06, rest_s=0, graph=True) / 1e9)

            key = f"small {outputs}x{inputs} M{tokens}"
            attempt(f"{key} cublas", lambda rate=rate: rate(torch.nn.functional.linear))
            best: list[tuple[int, str]] = []
            for tiles in candidates(outputs, inputs, tokens):
                try:
                    got = rate(lambda x, w, t=tiles: run_tiles(x, w, None, None, 1e-6, False, t))
                    early = " early" if tiles.early else ""
                    best.append((got, f"{tiles.rows}x{tiles.depth}/{tiles.splits} s{tiles.stages}{early}"))
                except Exception as error:
                    best.append((0, f"{tiles} {str(error)[:60]}"))
            best.sort(reverse=True)
            print(key, best, file=sys.stderr)
            note(key, [f"{got} {text}" for got, text in best[:4]])


def candidates(outputs: int, inputs: int, tokens: int) -> list[Any]:
    """What is planned, and its neighbours, with and without an early start."""
    from armillary.kernels.small_linear_triton import plan

    mine = plan(tokens, outputs, inputs)
    found = [mine, replace(mine, early=False)]
    for stages, factor in ((4, 1.0), (3, 1.5), (3, 0.5), (2, 1.0), (4, 0.5)):
        splits = max(1, round(mine.splits * factor))
        found.append(replace(mine, stages=stages, splits=splits))
    return [*found, replace(mine, rows=128, stages=3, splits=max(1, mine.splits)), replace(mine, depth=64, stages=6)]


def fused() -> None:
    """Decoding's MLP and projections as a model has them, fused against plain torch, weights in turn."""
    op = find_op("small_linear")
    for label in ("norm, swiglu 8", "residual 8"):
        case = op.cases[label]
        sets = [op.inputs(case, torch.Generator(CUDA).manual_seed(i)) for i in range(3)]
        for version in ("triton", "eager"):
            run = op.version(version).load()
            calls = [lambda s=s, run=run: run(*s) for s in sets]
            attempt(
                f"small {label} {version} gbps",
                lambda calls=calls, case=case: round(
                    op.work(case).bytes / seconds(*calls, budget_s=0.1, rest_s=0, graph=True) / 1e9
                ),
            )


# --- fp8


def fp8() -> None:
    from armillary.kernels.fp8_linear import E4M3, E5M2
    from armillary.kernels.fp8_linear_triton import _product, library_linear
    from armillary.kernels.fp8_product_triton import product
    from armillary.kernels.fp8_quantise_triton import quantise, quantise_columns

    x, w, g = normal(8192, 8192), normal(8192, 8192, scale=0.01), normal(8192, 8192)
    flops = 2 * 8192**3
    for scaling in ("row", "tensor"):
        a, b = quantise(x, E4M3, scaling), quantise(w, E4M3, scaling)
        for fast in (True, False):
            attempt(
                f"fp8 {scaling} scaled_mm fast={fast} tflops",
                lambda a=a, b=b, fast=fast: round(flops / seconds(lambda: _product(a, b, x.dtype, fast=fast)) / 1e12),
            )
            attempt(
                f"fp8 {scaling} own product fast={fast} tflops",
                lambda a=a, b=b, fast=fast: [
                    round(flops / seconds(lambda s=s: product(a, b, x.dtype, fast=fast, stages=s)) / 1e12)
                    for s in (3, 4)
                ],
            )
        attempt(
            f"fp8 {scaling} with activations tflops",
            lambda b=b, scaling=scaling: round(
                flops / seconds(lambda: _product(quantise(x, E4M3, scaling), b, x.dtype, fast=True)) / 1e12
            ),
        )
        attempt(
            f"fp8 {scaling} with both tflops",
            lambda scaling=scaling: round(flops / seconds(lambda: library_linear(x, w, scaling)) / 1e12),
        )
        for key, call in {
            "rows": lambda scaling=scaling: quantise(x, E4M3, scaling),
            "columns": lambda scaling=scaling: quantise_columns(x, E5M2, scaling),
        }.items():
            attempt(f"fp8 {scaling} quantise {key} us", lambda call=call: round(seconds(call) * 1e6, 1))
        leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = library_linear(leaf, weight, scaling)
        attempt(
            f"fp8 {scaling} backward tflops",
            lambda out=out, leaf=leaf, weight=weight: round(
                2 * flops / seconds(lambda: torch.autograd.grad(out, (leaf, weight), g, retain_graph=True)) / 1e12
            ),
        )


# --- attention


def attention() -> None:
    op = find_op("attention")
    for label in ("8k", "8k, groups of 4", "4k in 4 documents", "4k, window 1024", "4k, block-sparse"):
        attention_versions(op, label, ("triton", "cudnn", "flash"))


def flex() -> None:
    op = find_op("attention")
    for label in ("4k in 4 documents", "4k, window 1024", "4k, block-sparse"):
        attention_versions(op, label, ("flex",))


def attention_versions(op: Any, label: str, names: tuple[str, ...]) -> None:
    case = op.cases[label]
    for version in op.versions:
        if version.name in names and not version.refuses(case):
            run = version.load()
            attempt(f"attention {label} {version.name}", lambda run=run: attention_case(op, case, run))


def tiles() -> None:
    """Other ways to cut the work of our attention kernels."""
    from armillary.kernels import attention_own
    from armillary.kernels.attention_tiles import Tiles

    op = find_op("attention")
    case = op.cases["8k"]
    sweeps = {
        "forward_tiles": [(64, 64, 4, 2), (128, 64, 8, 3), (64, 32, 4, 4)],
        "key_tiles": [(64, 64, 4, 3), (64, 64, 4, 1), (64, 64, 8, 2)],
        "query_tiles": [(64, 64, 4, 2), (64, 32, 4, 3)],
    }
    can_copy, attention_own.can_copy = attention_own.can_copy, lambda *_: False
    attempt("attention 8k without TMA", lambda: attention_case(op, case, attention_own.attention))
    attention_own.can_copy = can_copy
    for name, options in sweeps.items():
        kept = getattr(attention_own, name)
        for queries, keys, warps, stages in options:
            one = Tiles(queries=queries, keys=keys, warps=warps, stages=stages)
            setattr(attention_own, name, lambda *_, one=one: one)
            attempt(
                f"attention {name} {queries}x{keys} w{warps} s{stages}",
                lambda name=name: attention_case(op, case, attention_own.attention, name == "forward_tiles"),
            )
        setattr(attention_own, name, kept)


def attention_case(op: Any, case: Any, run: Callable[..., Any], forward_only: bool = False) -> list[float]:
    """TFLOP/s forward and backward."""
    inputs = op.inputs(case, torch.Generator(CUDA).manual_seed(0))
    leaves = [x.requires_grad_() for x in inputs[:3]]
    work = op.work(case)
    forward = seconds(lambda: run(*inputs))
    found = [round(work.flops / forward / 1e12, 1)]
    if not forward_only:
        out = run(*inputs)
        grad = torch.randn_like(out)
        back = seconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
        found.append(round(work.backward_flops / back / 1e12, 1))
    return found


SECTIONS: dict[str, Callable[[], None]] = {
    "ceilings": ceilings, "agreement": agreement, "loss": loss, "small": small, "fp8": fp8, "attention": attention,
    "flex": flex, "tiles": tiles, "fused": fused, "products": products,
}  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    wanted = [name for name in sys.argv[1:] if name in SECTIONS] or list(SECTIONS)
    try:
        for name in wanted:
            began = time.monotonic()
            attempt(name, SECTIONS[name])
            note(f"{name} took_s", round(time.monotonic() - began, 1))
    except KeyboardInterrupt:
        note("stopped", "out of time")
    if not WARM:
        print(json.dumps(RESULTS, separators=(",", ":"), ensure_ascii=False))


if __name__ == "__main__":
    main()
