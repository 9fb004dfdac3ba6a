"""Router and experts of a layer, without gradients: for a few tokens, as decoding has it, and for many.

The time of a few tokens is that of reading the chosen experts; there an RMS norm before is part of it, as in
`gemm.skinny`. A residual after is part of both.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.moe.expert_choice import choose_experts
from armillary.kernels.moe.expert_load import ExpertLoad, count_choices
from armillary.kernels.moe.packed_stack import (
    PackedStack,
    random_stack,
    rows_bytes,
    select_experts,
    unstackable,
)
from armillary.kernels.norm.norm import norm
from armillary.kernels.pointwise.activation import activate
from armillary.kernels.quantized.weight_only import PackedFormat, WeightFormat
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token

MAX_TOKENS = 8
"""of `small_moe`"""
SMALL_BYTES = 160e6
"""weights up to which `small_moe`, which reads an expert for each of its tokens, is faster than sorting by expert: two
tokens of Qwen3-30B-A3B (150 MB), one of DeepSeek-V2-Lite (104), none of GPT-OSS-20B (199); H200"""
ACTIVATIONS = ("silu", "swiglu_clamped")


class MoEWeights(NamedTuple):
    """Router and experts of a layer; gate and up rows alternate."""

    router_EH: Tensor
    up_E2FH: Tensor | PackedStack
    down_EHF: Tensor | PackedStack
    router_bias_E: Tensor | None = None
    selection_bias_E: Tensor | None = None  # fp32
    up_bias_E2F: Tensor | None = None
    down_bias_EH: Tensor | None = None


def prefers_small(tokens: int, weights: MoEWeights, moe: MoE) -> bool:
    """Whether `small_moe` is for them, rather than `grouped_moe`."""
    _, hidden, ffn = weights.down_EHF.shape
    return tokens <= MAX_TOKENS and tokens * moe.top_k * 3 * hidden * ffn * weights.down_EHF.itemsize <= SMALL_BYTES


def moe_layer(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str = "silu",
    norm_H: Tensor | None = None,
    residual_MH: Tensor | None = None,
    eps: float = 1e-6,
    load: ExpertLoad | None = None,
) -> Tensor:
    """residual + Σ weight · expert(norm(x)) over the chosen experts; norm and residual only where they are given. The
    choices are counted in `load`."""
    if norm_H is not None:
        x_MH = norm(x_MH, norm_H, None, eps)
    logits_ME = widen(F.linear(x_MH, weights.router_EH, weights.router_bias_E))
    chosen_Mk, experts_Mk = choose_experts(logits_ME, moe, weights.selection_bias_E)
    if load is not None:
        count_choices(load, experts_Mk)
    chosen_Mk = chosen_Mk.to(x_MH.dtype)
    mixed_MH = torch.zeros_like(x_MH) if residual_MH is None else residual_MH
    for slot in range(moe.top_k):
        expert_M, weight_M1 = experts_Mk[:, slot], chosen_Mk[:, slot, None]
        rows_MH = x_MH * weight_M1 if moe.scale_input else x_MH
        out_MH = _expert(rows_MH, weights, expert_M, activation)
        mixed_MH = mixed_MH + (out_MH if moe.scale_input else out_MH * weight_M1)
    return mixed_MH


def _expert(x_MH: Tensor, weights: MoEWeights, expert_M: Tensor, activation: str) -> Tensor:
    """Every row through an expert of its own."""
    inner_M2F = torch.einsum("mh,mfh->mf", x_MH, select_experts(weights.up_E2FH, expert_M, x_MH.dtype))
    if weights.up_bias_E2F is not None:
        inner_M2F = inner_M2F + weights.up_bias_E2F[expert_M]
    down_MHF = select_experts(weights.down_EHF, expert_M, x_MH.dtype)
    out_MH = torch.einsum("mf,mhf->mh", activate(inner_M2F, activation, True), down_MHF)
    return out_MH if weights.down_bias_EH is None else out_MH + weights.down_bias_EH[expert_M]


@dataclass(frozen=True, kw_only=True)
class MoECase(Case):
    """Tokens through a layer's experts."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    score: str = "softmax"
    bias: bool = False  # of router and experts
    activation: str = "silu"
    norm: bool = True  # an RMS norm before, and a residual after
    groups: int = 1
    top_groups: int = 1
    selection_bias: bool = False
    scale_input: bool = False
    normalize: bool = True
    packed: PackedFormat | Literal[""] = ""  # format of the experts
    group: int = 0  # columns of packed experts with one scale; 0: the whole row
    zeros: bool = False

    @property
    def weight_format(self) -> WeightFormat | None:
        return WeightFormat(self.packed, self.group, self.zeros) if self.packed else None

    @property
    def moe(self) -> MoE:
        return MoE(
            num_experts=self.experts,
            top_k=self.top_k,
            ffn=self.ffn,
            score=self.score,  # type: ignore[arg-type]
            normalize=self.normalize,
            routed_scale=2.5 if self.groups > 1 else 1.0,
            selection_bias=self.selection_bias,
            groups=self.groups,
            top_groups=self.top_groups,
            scale_input=self.scale_input,
            router_bias=self.bias,
            expert_bias=self.bias,
        )


def inputs(case: MoECase, generator: torch.Generator) -> tuple[Any, ...]:
    E, H, F_ = case.experts, case.hidden, case.ffn

    def drawn(*shape: int) -> Tensor:
        return case.normal(generator, *shape) * shape[-1] ** -0.5

    def stack(rows: int, columns: int) -> Tensor | PackedStack:
        if case.weight_format is None:
            return drawn(E, rows, columns)
        return random_stack(case.weight_format, (E, rows, columns), generator)

    weights = MoEWeights(
        router_EH=3 * drawn(E, H),
        up_E2FH=stack(2 * F_, H),
        down_EHF=stack(H, F_),
        router_bias_E=case.normal(generator, E) if case.bias else None,
        selection_bias_E=0.1 * case.normal(generator, E).float() if case.selection_bias else None,
        up_bias_E2F=case.normal(generator, E, 2 * F_) if case.bias else None,
        down_bias_EH=case.normal(generator, E, H) if case.bias else None,
    )
    x = case.normal(generator, case.tokens, H)
    weight = 1 + 0.1 * case.normal(generator, H) if case.norm else None
    residual = case.normal(generator, case.tokens, H) if case.norm else None
    return x, weights, case.moe, case.activation, weight, residual, 1e-6


def touched_experts(tokens: int, experts: int, top_k: int) -> float:
    """Experts that random tokens choose, expected."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def work(case: MoECase) -> OpWork:
    """The router and each chosen expert are read once."""
    size, expert = case.torch_dtype.itemsize, 3 * case.hidden * case.ffn
    share = 1.0
    if case.weight_format is not None:
        share = rows_bytes(case.weight_format, 3 * case.ffn, case.hidden) / (size * expert)
    read = case.experts * case.hidden + share * touched_experts(case.tokens, case.experts, case.top_k) * expert
    flops = 2.0 * case.tokens * (case.top_k * expert + case.experts * case.hidden)
    return OpWork(flops=flops, bytes=size * (read + 3 * case.tokens * case.hidden), ceiling="read")


def refuses_many(case: MoECase) -> str | None:
    return f"it is for up to {MAX_TOKENS} tokens" if case.tokens > MAX_TOKENS else refuses(case)


def refuses(case: MoECase) -> str | None:
    if case.activation not in ACTIVATIONS:
        return f"it has no {case.activation}"
    if case.weight_format is not None and (why := _unstackable(case.weight_format, case)) is not None:
        return why
    if case.experts % case.groups or case.groups & (case.groups - 1):
        return "the number of groups must be a power of two"
    return "it sums in fp32" if case.dtype == "fp64" else None


def _unstackable(format: WeightFormat, case: MoECase) -> str | None:
    return unstackable(format, case.hidden) or unstackable(format, case.ffn)


def _not_tma(case: MoECase) -> str | None:
    aligned = all(n * case.torch_dtype.itemsize % 16 == 0 for n in (case.hidden, case.ffn))
    return refuses(case) if aligned else "rows of the weights must be multiples of 16 bytes"


def _fewer(case: MoECase, tokens: int = 64) -> MoECase:
    """The reference copies the weights of every choice, and a whole layer may not fit beside a loaded model: as many
    experts as the choice needs, no power of two where the case has none."""
    needed = case.groups * max(2, -(-case.top_k // case.top_groups))
    experts = max(needed, 8) if case.groups == 1 else needed
    if case.groups == 1 and case.experts & (case.experts - 1) and not experts & (experts - 1):
        experts += 1
    return replace(case, tokens=min(case.tokens, tokens), experts=min(case.experts, experts))


_QWEN = MoECase(tokens=1, hidden=2048, ffn=768, experts=128, top_k=8)
_GPT_OSS = MoECase(
    tokens=1,
    hidden=2880,
    ffn=2880,
    experts=32,
    top_k=4,
    score="softmax_topk",
    bias=True,
    activation="swiglu_clamped",
)
_PACKED: tuple[PackedFormat, ...] = ("int4", "fp8")
_DEEPSEEK = MoECase(tokens=1, hidden=2048, ffn=1408, experts=64, top_k=6, normalize=False)

SMALL_MOE = Op(
    name="small_moe",
    reference=moe_layer,
    versions=(in_triton("moe.small_moe_triton", "small_moe", refuses=refuses_many),),
    inputs=inputs,
    work=work,
    cases={
        **{f"qwen3-30b-a3b {tokens}": replace(_QWEN, tokens=tokens) for tokens in (1, 4, 8)},
        "gpt-oss-20b 1": _GPT_OSS,
        "gpt-oss-20b 1, mxfp4": replace(_GPT_OSS, packed="mxfp4", group=32),
        "qwen3-30b-a3b 1, int4": replace(_QWEN, packed="int4", group=128),
        "qwen3-30b-a3b 4, fp8 blocks": replace(_QWEN, tokens=4, packed="fp8", group=128),
        "mixtral-8x7b 1": MoECase(tokens=1, hidden=4096, ffn=14336, experts=8, top_k=2),
        "deepseek-v2-lite 1": _DEEPSEEK,
    },
    small=lambda case: _fewer(case, MAX_TOKENS),
)
GROUPED_MOE = Op(
    name="grouped_moe",
    reference=moe_layer,
    versions=(
        in_triton("moe.grouped_moe_triton", "grouped_moe", refuses=_not_tma, needs=("tma",)),
        in_triton("moe.grouped_moe_triton", "grouped_moe_pointers", name="triton, pointers", refuses=refuses),
    ),
    inputs=inputs,
    work=work,
    cases={
        **{f"qwen3-30b-a3b {tokens}": replace(_QWEN, tokens=tokens, norm=False) for tokens in (16, 64, 256, 1024)},
        "gpt-oss-20b 256": replace(_GPT_OSS, tokens=256, norm=False),
        "gpt-oss-20b 256, mxfp4": replace(_GPT_OSS, tokens=256, norm=False, packed="mxfp4", group=32),
        **{
            f"qwen3-30b-a3b {tokens}, {kind}": replace(_QWEN, tokens=tokens, norm=False, packed=kind, group=128)
            for tokens in (16, 256)
            for kind in _PACKED
        },
        "deepseek-v2-lite 256": replace(_DEEPSEEK, tokens=256, norm=False),
    },
    small=_fewer,
)
