"""An fp8 GEMM with scales per block of 128 × 128 weights and per 128 inputs of a token, as DeepSeek's checkpoints have
them: for many tokens, where tensor cores set the time. Where rows of several weights are fused (QKV, gate and up), each
row has its own scale per 128 inputs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, in_triton, rows_to_check

# M tokens, K inputs, N outputs

BLOCK = 128
LARGEST = 448.0  # of E4M3
TINY = 1e-12


def quantise_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [M, K], and a scale per token and 128 inputs [M, K / 128]."""
    groups = x_MK.unflatten(1, (-1, BLOCK)).float()
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    return (groups / scale).flatten(1).to(torch.float8_e4m3fn), scale[..., 0]


def spread_blocks(scale: Tensor, rows: int) -> Tensor:
    """[N, K] of a scale per block [N / 128, K / 128], or per row [N, K / 128]."""
    if len(scale) != rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return scale.repeat_interleave(BLOCK, 1)


def in_blocks(scale: Tensor) -> Tensor:
    """A scale per row as one per 128 rows where these are alike; else as it is. Waits for the device."""
    if len(scale) % BLOCK:
        return scale
    blocks = scale.unflatten(0, (-1, BLOCK))
    return blocks[:, 0].contiguous() if bool((blocks == blocks[:, :1]).all()) else scale


def reference(x: Tensor, codes_NK: Tensor, scale: Tensor) -> Tensor:
    """fp8(x) @ weightᵀ in x's dtype; `scale` is [N / 128, K / 128], N rounded up, or [N, K / 128]."""
    numbers, of_token = quantise_tokens(x.reshape(-1, x.shape[-1]))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = numbers.to(dtype) * of_token.to(dtype).repeat_interleave(BLOCK, 1)
    weight = codes_NK.to(dtype) * spread_blocks(scale.to(dtype), len(codes_NK))
    return (rows @ weight.t()).to(x.dtype).unflatten(0, x.shape[:-1])


@dataclass(frozen=True, kw_only=True)
class BlockFp8Case(Case):
    """Many tokens through a weight in fp8 blocks."""

    tokens: int
    outputs: int
    inputs: int
    by_row: bool = False  # each row has its own scales


def inputs(case: BlockFp8Case, generator: torch.Generator) -> tuple[object, ...]:
    weight = case.normal(generator, case.outputs, case.inputs) * 64
    shape = case.outputs if case.by_row else -(-case.outputs // BLOCK), case.inputs // BLOCK
    scale = (torch.rand(shape, generator=generator, device=generator.device) + 0.5) / (64 * case.inputs**0.5)
    return case.normal(generator, case.tokens, case.inputs), weight.to(torch.float8_e4m3fn), scale


def work(case: BlockFp8Case) -> OpWork:
    """2·M·N·K FLOPs; x and the weight are read, the result is written."""
    M, N, K = case.tokens, case.outputs, case.inputs
    return OpWork(flops=2.0 * M * N * K, bytes=2.0 * M * (K + N) + N * K, ceiling="fp8")


def refuses(case: BlockFp8Case) -> str | None:
    if case.inputs % BLOCK or case.outputs % 16:
        return "inputs are no multiple of 128, or outputs none of 16"
    return None if case.dtype in ("bf16", "fp16") else "it is for inputs of 16 bits"


def refused_by_library(case: BlockFp8Case) -> str | None:
    in_part = case.outputs % BLOCK and not case.by_row
    return refuses(case) or ("outputs are no multiple of 128" if in_part else None)


def small(case: BlockFp8Case) -> BlockFp8Case:
    return replace(case, tokens=rows_to_check(case, case.tokens, case.inputs + case.outputs))


BLOCK_FP8 = Op(
    name="block_fp8_linear",
    reference=reference,
    versions=(
        in_triton(
            "quantized.block_fp8_triton",
            "library_linear",
            name="triton+cublas",
            refuses=refused_by_library,
            needs=("fp8", "tma"),
        ),
        in_triton("quantized.block_fp8_triton", "block_fp8_linear", refuses=refuses, needs=("fp8", "tma")),
    ),
    inputs=inputs,
    work=work,
    tolerance={"bf16": 2e-2, "fp16": 2e-2},
    cases={
        "deepseek-v3, up": BlockFp8Case(tokens=4096, outputs=4096, inputs=7168),
        "llama-3-8b, gate and up": BlockFp8Case(tokens=4096, outputs=28672, inputs=4096),
        "llama-3-8b, gate and up, by row": BlockFp8Case(tokens=4096, outputs=28672, inputs=4096, by_row=True),
        "llama-3-8b, down": BlockFp8Case(tokens=4096, outputs=4096, inputs=14336),
    },
    small=small,
)
