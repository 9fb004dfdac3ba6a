"""Kernels compiled for a GPU that is not here, through their real launches: what each takes of shared memory.

    python -m tests.kernels.compile_for 86 [CASE …]

Without TRITON_INTERPRET. Tensors are on the CPU, the chip is made up from the table of `machine.accelerator`, and
launches compile instead of running. Prints JSON: case -> [[kernel, bytes of shared memory, bytes of stack], …], or how
it failed. A stack is what registers did not hold; 0 where triton carries no cuobjdump.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from armillary.machine import accelerator

BF16 = torch.bfloat16


def pretend_and_compile(capability: accelerator.Capability, compiled: list[tuple[str, int, int]]) -> None:
    """From here on every launch is compiled for the chip, as far as shared memory is known, and noted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    chip = accelerator.of_nvidia(capability, multiprocessors=132)
    accelerator.accelerator_of = lambda device: chip  # type: ignore[assignment]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
            is_active=lambda: True,
        )
    )
    run = JITFunction.run
    assert triton.knobs.runtime.interpret is False, "the interpreter compiles nothing"

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, int(kernel.metadata.shared), stack_bytes(kernel.asm["cubin"])))
        return kernel

    JITFunction.run = note


def stack_bytes(binary: bytes) -> int:
    """Of a thread of the kernel: registers that are spilled, and arrays that are indexed at run time."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", done.stdout + done.stderr)
    assert found is not None, done.stdout
    return int(found[1])


def grouped(rows: int, *, tma: bool, dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.gemm import grouped_triton as launches

    x, weight = torch.zeros(rows, 128, dtype=dtype), torch.zeros(4, 256, 128, dtype=dtype)
    ends = torch.tensor([rows] * 4, dtype=torch.int32)
    dy = launches._grouped_gemm(x, weight, ends, transposed=True, tma=tma)
    launches._grouped_gemm(dy, weight, ends, transposed=False, tma=tma)
    launches._row_sums(dy, x, ends, 4, tma=tma)


def attention(
    head_dim: int,
    dtype: torch.dtype = BF16,
    *,
    heads: int = 4,
    documents: bool = False,
    window: int = 0,
    sparse: bool = False,
    merged: bool = False,
) -> None:
    """A window has sinks too, as gpt-oss has."""
    from armillary.kernels.attention import attention_triton as attention_own

    q, k = (torch.zeros(1, 512, n, head_dim, dtype=dtype) for n in (heads, 2))
    packed, sinks = torch.zeros(1, 512, dtype=torch.int32) if documents else None, torch.zeros(heads)
    blocks = torch.ones(4, 4, dtype=torch.bool) if sparse else None
    masks = (packed, blocks, sinks if window else None, None, 0.1, window, 0.0, True, merged)
    out, lse = attention_own._attention(q, k, k, *masks)
    attention_own._attention_backward(out, out, lse, q, k, k, *masks)


def window_attention() -> None:
    from armillary.kernels.attention import window_attention as launches
    from armillary.kernels.attention.attention import AttentionOptions

    q, k, sinks = torch.zeros(2, 300, 16, 64, dtype=BF16), torch.zeros(2, 300, 2, 64, dtype=BF16), torch.zeros(16)
    assert launches.why_not(q, k, k, AttentionOptions(window=launches.WINDOW, sinks_N=sinks)) is None
    for added in (sinks, None):
        out, lse = launches._attention(q, k, k, added, 0.1, 128, True)
        launches._attention_backward(out, out, lse, q, k, k, added, 0.1, 128, True)


def small_linear(
    tokens: int, outputs: int, dtype: torch.dtype = BF16, *, inputs: int = 4096, bias: bool = False
) -> None:
    from armillary.kernels.gemm import skinny_triton as launches

    x, weight = torch.zeros(tokens, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)
    added = torch.zeros(outputs, dtype=dtype) if bias else None
    with torch.no_grad():
        launches._launched(x, weight, None, None, 1e-6, False, added)


def weight_only(tokens: int, packed: Any, group: int) -> None:
    from armillary.kernels.quantized import weight_only_triton as launches
    from armillary.kernels.quantized.weight_only import WeightOnlyCase, inputs

    case = WeightOnlyCase(tokens=tokens, outputs=256, inputs=4096, kind=packed, group=group, device="cpu")
    x, *weight = inputs(case, torch.Generator().manual_seed(0))
    with torch.no_grad():
        launches._launched(x, *weight, None, None, 1e-6, False, None)


def block_fp8(*, by_row: bool) -> None:
    from armillary.kernels.quantized.block_fp8 import BLOCK_FP8, BlockFp8Case
    from armillary.kernels.quantized.block_fp8_triton import BlockFp8Tiles, block_fp8_linear

    case = BlockFp8Case(tokens=512, outputs=1024, inputs=512, by_row=by_row, device="cpu")
    block_fp8_linear(*BLOCK_FP8.inputs(case, torch.Generator().manual_seed(0)), tiles=BlockFp8Tiles())


def paged(
    head_dim: int,
    max_query: int,
    *,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    window: int = 0,
    chunked: bool = False,
    sinks: bool = False,
) -> None:
    from armillary.kernels.paged import paged_attention_triton as launches

    q = torch.zeros(2 * max_query, 8, head_dim, dtype=dtype)
    pages = torch.zeros(64, 2, 2, 16, head_dim, dtype=cache or dtype)
    tables, starts = torch.zeros(2, 32, dtype=torch.int32), torch.tensor([0, max_query, 2 * max_query]).int()
    lengths = torch.tensor([max_query, max_query]).int()
    scales = torch.ones(2, 2) if cache else None
    launches._launch_both = one_stream(launches._launch_both)  # a second stream needs a device
    sink = torch.zeros(8) if sinks else None
    launches._launched(q, pages, tables, starts, lengths, sink, None, scales, 0.1, max_query, window, chunked, 0.0)


def one_token(head_dim: int, heads: dict[str, Any] | None = None, rotates: bool = True, **options: Any) -> None:
    from armillary.kernels.attention.attention import AttentionOptions
    from armillary.kernels.paged.fused_decode_triton import attend_tokens
    from armillary.kernels.paged.paged_attention import PagedBatch
    from armillary.kernels.paged.qkv_to_cache import QkvOptions

    qkv, cache = torch.zeros(1, 2 * 6 * head_dim, dtype=BF16), torch.zeros(64, 2, 2, 16, head_dim, dtype=BF16)
    turns = torch.zeros(1, head_dim // 2, dtype=BF16) if rotates else None
    zero = torch.zeros(1, dtype=torch.int32)
    batch = PagedBatch(
        tables_BP=torch.zeros(1, 32, dtype=torch.int32),
        starts=torch.tensor([0, 1]).int(),
        lengths_B=zero + 9,
        max_query=1,
    )
    asked = AttentionOptions(scale=0.1, **options)
    attend_tokens(qkv, cache, zero.long(), turns, turns, QkvOptions(**heads or {}), batch, asked)


def one_stream(both: Callable[..., None]) -> Callable[..., None]:
    from armillary.kernels.paged import paged_attention_triton as launches

    def run(*args: Any) -> None:
        launches.fits_beside = lambda *rest: False
        both(*args)

    return run


def fp8_gemm(rows: int, *, fast: bool) -> None:
    from armillary.kernels.fp8.matmul_triton import gemm

    a, b = (torch.zeros(n, 512).to(torch.float8_e4m3fn) for n in (rows, 1024))
    gemm((a, torch.ones(rows, 1)), (b, torch.ones(1024, 1)), BF16, fast=fast)


def norm(columns: int, dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.norm import norm_triton

    x, weight = torch.zeros(512, columns, dtype=dtype), torch.ones(columns, dtype=dtype, requires_grad=True)
    y = norm_triton.norm(x.requires_grad_(), weight, None, 1e-6)
    y.sum().backward()


def loss(vocab: int, dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.loss import linear_cross_entropy_triton

    z, targets = torch.zeros(64, vocab, dtype=dtype), torch.zeros(64, dtype=torch.int64)
    linear_cross_entropy_triton.to_gradient_(z, targets, torch.zeros(64), -100, 0.0, 1.0, write=True)


FP32, FP8 = torch.float32, torch.float8_e4m3fn


def small_moe(
    tokens: int,
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = BF16,
    *,
    counted: bool = False,
    **packed: Any,
) -> None:
    from armillary.kernels.moe.expert_load import ExpertLoad
    from armillary.kernels.moe.moe import MoECase, inputs
    from armillary.kernels.moe.small_moe_triton import small_moe

    name = "bf16" if dtype == BF16 else "fp32"
    case = MoECase(
        tokens=tokens, hidden=hidden, ffn=ffn, experts=experts, top_k=top_k, dtype=name, device="cpu", **packed
    )
    load = ExpertLoad(torch.zeros(experts, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    small_moe(*inputs(case, torch.Generator().manual_seed(0)), load if counted else None)


def grouped_moe(tokens: int, dtype: torch.dtype = BF16, *, tma: bool, **packed: Any) -> None:
    from armillary.kernels.moe.grouped_moe_triton import grouped_moe
    from armillary.kernels.moe.moe import MoECase, inputs

    name = "bf16" if dtype == BF16 else "fp32"
    case = MoECase(
        tokens=tokens,
        hidden=256,
        ffn=192,
        experts=8,
        top_k=2,
        dtype=name,
        device="cpu",
        bias=True,
        norm=False,
        **packed,
    )
    grouped_moe(*inputs(case, torch.Generator().manual_seed(0)), tma=tma)


def latent(heads: int, queries: int = 1, dtype: torch.dtype = BF16, page: int = 64) -> None:
    from armillary.kernels.latent import latent_decode_triton as launches

    q, ropes = torch.zeros(2 * queries, heads, 512, dtype=dtype), torch.zeros(2 * queries, heads, 64, dtype=dtype)
    tables, starts = torch.zeros(2, 32, dtype=torch.int32), torch.tensor([0, queries, 2 * queries]).int()
    pages, lengths = torch.zeros(64, page, 576, dtype=dtype), torch.tensor([queries, queries]).int()
    launches._launched(q, ropes, pages, tables, starts, lengths, 0.1, queries)


def latent_prefill(dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.latent import latent_prefill_triton as launches

    q, ropes = torch.zeros(300, 2, 128, dtype=dtype), torch.zeros(300, 2, 64, dtype=dtype)
    tables, starts = torch.zeros(1, 32, dtype=torch.int32), torch.tensor([0, 300]).int()
    pages, up = torch.zeros(64, 16, 576, dtype=dtype), torch.zeros(2, 256, 512, dtype=dtype)
    launches._launched(q, ropes, pages, up, tables, starts, torch.tensor([300]).int(), 0.1, 300)


def latent_to_cache() -> None:
    from armillary.kernels.latent.latent_to_cache import LATENT_TO_CACHE, LatentCacheCase
    from armillary.kernels.latent.latent_to_cache_triton import latent_to_cache as run

    run(*LATENT_TO_CACHE.inputs(LatentCacheCase(tokens=2, device="cpu"), torch.Generator().manual_seed(0)))


def delta_rows(tokens: int, dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.delta.delta_rows import DELTA_ROWS, DeltaRowsCase
    from armillary.kernels.delta.delta_rows_triton import delta_rows as run

    case = DeltaRowsCase(sequences=2, tokens=tokens, dtype="bf16" if dtype is BF16 else "fp32", device="cpu")
    run(*DELTA_ROWS.inputs(case, torch.Generator().manual_seed(0)))


def lora(rows: int, slots: int = 64, rank: int = 16, dtype: torch.dtype = BF16) -> None:
    from armillary.kernels.lora.grouped_lora import lora_rows
    from armillary.kernels.lora.grouped_lora_triton import add_lora

    x, y = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(rows, 1536, dtype=dtype)
    a, b = torch.zeros(slots, 3 * rank, 1024, dtype=dtype), torch.zeros(slots, 1536, rank, dtype=dtype)
    part = torch.arange(1536, dtype=torch.int32) // 512
    add_lora(y, x, a, b, part, lora_rows(torch.arange(rows) % slots, slots))


def large_linear(tiles: str = "", *, residual: bool = False) -> None:
    from armillary.kernels.gemm import large_linear_wgmma as launches

    x, weight, y = (torch.zeros(m, n, dtype=BF16) for m, n in ((1000, 520), (776, 520), (1000, 776)))
    added = y if residual else None
    assert launches.why_not(x, weight, added) is None
    launches.run_tiles(x, weight, y[0] if residual else None, "silu" if residual else "none", added, tiles)


def simplicial(heads: int, dtype: torch.dtype = BF16, *, hopper: bool = False) -> None:
    from armillary.kernels.simplicial import simplicial_triton as launches

    q, kv = torch.zeros(1, 300, heads, 128, dtype=dtype), torch.zeros(1, 300, 2, 128, dtype=dtype)
    windows = (None, 0.1, 32, 512, hopper)
    out, lse = launches._simplicial(q, kv, kv, *windows)
    launches._simplicial_backward(out, out, lse, q, kv, kv, *windows)


PACKED_EXPERTS: dict[str, dict[str, Any]] = {
    "mxfp4": {"packed": "mxfp4", "group": 32},
    "nvfp4": {"packed": "nvfp4", "group": 16},
    "int4": {"packed": "int4", "group": 96, "zeros": True},
    "int8": {"packed": "int8"},
    "fp8 blocks": {"packed": "fp8", "group": 96},
}
CASES: dict[str, Callable[[], None]] = {
    **{f"2-simplicial, {heads} heads": lambda heads=heads: simplicial(heads) for heads in (4, 128)},
    "2-simplicial, Hopper": lambda: simplicial(128, hopper=True),
    "large linear, Hopper": large_linear,
    "large linear of 192 rows, Hopper": lambda: large_linear("192 rows"),
    "large linear of 192 rows, stream-K, Hopper": lambda: large_linear("192 rows, stream-K"),
    "large linear with residual, Hopper": lambda: large_linear(residual=True),
    "attention 64, window 128, Hopper": window_attention,
    "2-simplicial, fp32": lambda: simplicial(8, FP32),
    "delta rows, decoding": lambda: delta_rows(1),
    "delta rows, prompts": lambda: delta_rows(3),
    "delta rows, fp32": lambda: delta_rows(1, FP32),
    **{f"many experts, {m} tokens": lambda m=m: grouped_moe(m, tma=True) for m in (16, 64, 160, 400)},
    **{f"many experts, pointers, {m} tokens": lambda m=m: grouped_moe(m, tma=False) for m in (16, 64, 160, 400)},
    **{
        f"many experts, {name}, {m} tokens": lambda m=m, packed=packed: grouped_moe(m, tma=False, **packed)
        for name, packed in PACKED_EXPERTS.items()
        for m in (16, 400, 1024)
    },
    **{
        f"experts for {m} tokens, {name}": lambda m=m, packed=packed: small_moe(m, 2880, 2880, 8, 4, **packed)
        for name, packed in PACKED_EXPERTS.items()
        for m in (1, 8)
    },
    "many experts, fp32": lambda: grouped_moe(64, FP32, tma=False),
    **{f"latent decode, {heads} heads": lambda heads=heads: latent(heads) for heads in (16, 32, 128)},
    "latent decode, small pages": lambda: latent(16, page=16),
    "latent decode, several queries": lambda: latent(16, queries=4, page=16),
    "latent decode, fp32": lambda: latent(16, dtype=FP32),
    "latent prefill": latent_prefill,
    "latent prefill, fp32": lambda: latent_prefill(FP32),
    "latent to cache": latent_to_cache,
    **{f"experts for {m} tokens": lambda m=m: small_moe(m, 2048, 768, 16, 8) for m in (1, 8)},
    "experts for 8 tokens, counted": lambda: small_moe(8, 2048, 768, 16, 8, counted=True),
    "experts for one token, long rows": lambda: small_moe(1, 4096, 7168, 4, 2),
    "experts for 8 tokens, fp32": lambda: small_moe(8, 1024, 768, 4, 2, FP32),
    "grouped, pointers, few rows": lambda: grouped(32, tma=False),
    "grouped, pointers, some rows": lambda: grouped(200, tma=False),
    "grouped, pointers": lambda: grouped(1000, tma=False),
    "grouped, pointers, many rows": lambda: grouped(9000, tma=False),
    "grouped, pointers, fp32": lambda: grouped(1000, tma=False, dtype=FP32),
    "grouped, tma": lambda: grouped(1000, tma=True),
    "grouped, tma, many rows": lambda: grouped(9000, tma=True),
    **{f"attention {dim}": lambda dim=dim: attention(dim) for dim in (64, 128, 256)},
    **{f"attention {dim}, fp32": lambda dim=dim: attention(dim, FP32) for dim in (64, 128, 256)},
    "attention 128, documents": lambda: attention(128, documents=True),
    "attention 128, block-sparse": lambda: attention(128, sparse=True),
    "attention 128, block-sparse, merged heads": lambda: attention(128, sparse=True, merged=True),
    "attention 128, documents, merged heads": lambda: attention(128, documents=True, merged=True),
    "attention 128, window": lambda: attention(128, window=300),
    "attention 128, merged heads": lambda: attention(128, merged=True),
    "attention 64, narrow window": lambda: attention(64, window=128),
    "attention 64, narrow window, 8 heads share keys": lambda: attention(64, heads=16, window=128),
    **{
        f"small linear {m} × {n}": lambda m=m, n=n: small_linear(m, n) for m in (8, 32, 64) for n in (1024, 4096, 28672)
    },
    "small linear, fp32": lambda: small_linear(32, 4096, FP32),
    "small linear, one token": lambda: small_linear(1, 4096),
    **{
        f"weight only {m}, {packed} by {group}": lambda m=m, packed=packed, group=group: weight_only(m, packed, group)
        for m in (1, 8, 64, 65)
        for packed, group in (("int4", 128), ("int8", 4096), ("fp8", 128), ("mxfp4", 32), ("table", 64))
    },
    **{
        f"weight only {m}, {kind}": lambda m=m, kind=kind: weight_only(m, kind, 16 if kind == "q6_k" else 32)
        for m in (1, 8, 65)
        for kind in ("q4_k", "q5_k", "q6_k")
    },
    "fp8 by blocks, tma": lambda: block_fp8(by_row=False),
    "fp8 by rows, tma": lambda: block_fp8(by_row=True),
    **{f"decode {dim}": lambda dim=dim: paged(dim, 1) for dim in (64, 128, 256)},
    **{f"prefill {dim}": lambda dim=dim: paged(dim, 300) for dim in (64, 128, 256)},
    "prefill 128, fp32": lambda: paged(128, 300, dtype=FP32),
    "prefill 256, fp32": lambda: paged(256, 300, dtype=FP32),
    "decode 128, fp32": lambda: paged(128, 1, dtype=FP32),
    "decode 256, 64 rows": lambda: paged(256, 16),
    "decode 256, fp32": lambda: paged(256, 1, dtype=FP32),
    **{f"one stream {dim}": lambda dim=dim: one_token(dim) for dim in (64, 128, 256)},
    "one stream, gpt-oss": lambda: one_token(64, window=128, sinks_N=torch.zeros(8)),
    "one stream, llama 4": lambda: one_token(128, {"norm": "rms", "interleaved": True}, chunk=8192),
    "one stream, llama 4 without rope": lambda: one_token(128, {"q_scale_T": torch.ones(1)}, rotates=False),
    "small linear, gpt-oss": lambda: small_linear(1, 5120, inputs=2880, bias=True),
    "small linear, gpt-oss, 8 tokens": lambda: small_linear(8, 5120, inputs=2880, bias=True),
    "decode, gpt-oss": lambda: paged(64, 1, window=128, sinks=True),
    "prefill, gpt-oss": lambda: paged(64, 300, window=128, sinks=True),
    "decode, llama 4": lambda: paged(128, 1, window=8192, chunked=True),
    "prefill, llama 4": lambda: paged(128, 300, window=8192, chunked=True),
    "decode 128, fp8 cache": lambda: paged(128, 1, cache=FP8),
    "prefill 128, fp8 cache": lambda: paged(128, 300, cache=FP8),
    "fp8 gemm": lambda: fp8_gemm(512, fast=True),
    "fp8 gemm, exact sums": lambda: fp8_gemm(512, fast=False),
    **{f"norm {n}": lambda n=n: norm(n) for n in (1024, 4096, 16384)},
    "norm 8192, fp32": lambda: norm(8192, FP32),
    "loss": lambda: loss(128256),
    "adapters, one row": lambda: lora(1, slots=1),
    "adapters, decode": lambda: lora(256),
    "adapters, prefill": lambda: lora(2048),
    "adapters, fp32": lambda: lora(256, dtype=FP32),
    "adapters, rank 64": lambda: lora(2048, rank=64),
}
NEEDS = {"tma": (9, 0), "fp8": (8, 9), "Hopper": (9, 0)}
"""words of a case's name -> compute capability from which a chip is offered it; Hopper's own are for no other"""


def main(number: str, *names: str) -> None:
    capability, compiled = (int(number[:-1]), int(number[-1])), []  # type: ignore[var-annotated]
    pretend_and_compile(capability, compiled)
    found: dict[str, Any] = {}
    for name in names or CASES:
        if any(word in name and capability < least for word, least in NEEDS.items()):
            continue
        if "Hopper" in name and capability != NEEDS["Hopper"]:
            continue
        compiled.clear()
        try:
            CASES[name]()
            found[name] = list(compiled)
        except Exception as error:  # every case is told of
            found[name] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
