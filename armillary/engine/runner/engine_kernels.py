"""The engine's kernels, chosen once when it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from armillary.kernels.core.choose_version import choose
from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.core.op import Case, Op
from armillary.kernels.core.requirements import has_triton
from armillary.kernels.delta.delta_rows import DELTA_ROWS, DeltaRowsCase, delta_rows
from armillary.kernels.gemm.grouped import GROUPED_LINEAR, GroupedCase
from armillary.kernels.gemm.skinny import SMALL_LINEAR, SmallLinearCase
from armillary.kernels.latent.latent_decode import LATENT_DECODE, LatentCase, latent_decode
from armillary.kernels.latent.latent_prefill import LATENT_PREFILL, LatentPrefillCase, latent_prefill
from armillary.kernels.latent.latent_to_cache import LATENT_TO_CACHE, LatentCacheCase, latent_to_cache
from armillary.kernels.lora.grouped_lora import LORA, LoraCase, add_lora, add_lora_by_adapter
from armillary.kernels.moe.moe import GROUPED_MOE, SMALL_MOE, MoECase
from armillary.kernels.moe.packed_stack import DEQUANTISE_STACK, StackCase
from armillary.kernels.norm.norm import ADD_NORM, NORM, NormCase, add_norm, norm, row_add_norm, row_norm
from armillary.kernels.paged.paged_attention import PAGED_ATTENTION, PagedCase, by_sdpa, paged_attention
from armillary.kernels.paged.qkv_to_cache import QKV_CACHE, QkvCase, qkv_cache, unpadded
from armillary.kernels.pointwise.activation import ACTIVATE, ActivationCase, activate
from armillary.kernels.quantized.weight_only import WeightFormat
from armillary.kernels.sampling.logprobs import LOGPROBS, LogprobCase, logprobs
from armillary.kernels.sampling.sampling import SAMPLE, SampleCase, sample, sample_rows
from armillary.kernels.simplicial.paged import PAGED_SIMPLICIAL, PagedSimplicialCase, paged_simplicial
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.quantized.packed_linear import packed_modules
from armillary.spec.model import ModelConfig, MoE

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class EngineKernels:
    """One function per operation."""

    norm: Run = norm
    add_norm: Run = add_norm
    activate: Run = activate
    qkv_cache: Run = qkv_cache
    norms_apart: bool = False
    """the model has a QK norm over all heads, which `qkv_cache` does not have"""
    attention: Run = paged_attention
    latent_cache: Run = latent_to_cache
    latent_decode: Run = latent_decode
    latent_prefill: Run = latent_prefill
    delta_rows: Run = delta_rows
    simplicial: Run = paged_simplicial
    """2-simplicial attention over the cache"""
    tokens: Run | None = None
    """`qkv_cache` and `attention` fused, for a few sequences with one new token each; none: one after the other"""
    look_up: Run | None = None
    """gathers the inputs of a decode step in one launch; none: one launch each"""
    put: Run | None = None
    """writes sampled tokens into their rows in one launch; none: index_put"""
    sample: Run = sample
    logprobs: Run = logprobs
    small: Run | None = None
    """GEMM for a few tokens fused with the norm before and the gate or residual after; none: plain GEMMs"""
    grouped: Run | None = None
    """grouped GEMM over the experts of a layer, without a synchronization; none: expert by expert"""
    moe: Run | None = None
    """router and experts of a layer for a few tokens; none: as for many"""
    grouped_moe: Run | None = None
    """router and experts of a layer for many tokens; none: one after the other, with `grouped`"""
    lora: Run = add_lora
    """adds the LoRA adapters of a step's rows to a projection"""
    capturable: bool = False
    """none of them waits for the device, so that steps can be captured in CUDA graphs"""

    def for_packed(self, *, stacks: bool = False) -> EngineKernels:
        """For packed weights; `small` is for layers that are not packed. Those of experts take plain weights or
        `stacks` (PackedStack)."""
        if stacks:
            return self
        return replace(
            self,
            grouped=None,
            moe=None,
            grouped_moe=None,
            capturable=self.capturable and self.grouped is None and self.grouped_moe is None,  # experts one by one
        )


_CHECKED = 8  # rows of the agreement check at the start, which has to be fast; the bench checks larger ones
REFERENCE = EngineKernels()


def pick_kernels(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    experts: Sequence[WeightFormat] = (),
) -> EngineKernels:
    """The first deterministic version of each operation for this device and model; nothing is timed, so that an engine
    starts quickly and two engines compute the same. `experts`: the formats of their stacks."""
    if device.type == "cpu":
        return EngineKernels(
            norm=row_norm,
            add_norm=row_add_norm,
            qkv_cache=unpadded,
            attention=by_sdpa,
            sample=sample_rows,
            lora=add_lora_by_adapter,
        )
    name = next(key for key, known in DTYPES.items() if known == dtype)
    on: dict[str, Any] = {"dtype": name, "device": device.type}
    batch = min(batch, _CHECKED)
    normed = NormCase(rows=batch, columns=config.hidden, kind=config.norm, plus_one=config.norm_plus_one, **on)
    ffn = config.ffn or config.hidden
    biased = config.qkv_bias or config.out_bias or config.mlp_bias
    small = SmallLinearCase(tokens=1, outputs=config.hidden, inputs=config.hidden, bias=biased, **on)
    attention, on_triton = (_attention if config.mla is None else _latent_attention)(config, batch, on)
    fused = on_triton and config.mla is None and not attention["norms_apart"]
    moe, grouped_moe = (
        _moe(config, op, tokens, on, experts) for op, tokens in ((SMALL_MOE, 2), (GROUPED_MOE, _CHECKED))
    )
    grouped = _grouped(config, batch, on) if grouped_moe is None else None
    delta, simplicial = _delta(config, batch, on), _pairs(config, batch, on)
    return EngineKernels(
        grouped=grouped,
        moe=moe,
        grouped_moe=grouped_moe,
        norm=_first(NORM, normed),
        add_norm=_first(ADD_NORM, normed),
        activate=_first(
            ACTIVATE, ActivationCase(rows=batch, ffn=ffn, activation=config.activation, gated=config.gated, **on)
        ),
        **attention,
        delta_rows=delta_rows if delta is None else delta.run,
        simplicial=paged_simplicial if simplicial is None else simplicial.run,
        **_decode_kernels(device, fused=fused),
        capturable=on_triton
        and all(each is None or each.version == "triton" for each in (delta, simplicial))
        and (config.moe is None or grouped is not None or grouped_moe is not None),
        lora=_first(LORA, LoraCase(rows=batch, slots=2, rank=8, outputs=config.hidden, inputs=config.hidden, **on)),
        sample=_first(SAMPLE, SampleCase(batch=batch, vocab=config.vocab, **on)),
        logprobs=_first(LOGPROBS, LogprobCase(batch=batch, vocab=config.vocab, **on)),
        small=_first(SMALL_LINEAR, small) if _plain(config, moe and grouped_moe) else None,
    )


def kernels_of_packed(
    kernels: EngineKernels, model: nn.Module, stackable: Sequence[PackedExperts], weight: torch.Tensor
) -> EngineKernels:
    """`kernels` for this model, whose packed layers get theirs: linear layers on a GPU, and experts in stacks where
    kernels take them."""
    packed = packed_modules(model)
    if not packed:
        return kernels
    stacked = bool(stackable) and kernels.moe is not None and kernels.grouped_moe is not None
    for experts in stackable if stacked else ():
        experts.stack()
    in_stacks = {id(linear) for experts in stackable for linear in experts.linears} if stacked else set()
    for linear in packed:
        if weight.device.type == "cuda" and id(linear) not in in_stacks:
            linear.use_kernels(weight.dtype)
    return kernels.for_packed(stacks=stacked)


def _attention(config: ModelConfig, batch: int, on: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(cache write and attention, whether both are Triton's)."""
    heads: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    apart = config.qk_norm == "all" and config.norm == "rms" and not config.norm_plus_one
    qk: dict[str, Any] = {"norm": config.norm, "all_heads": config.qk_norm == "all"}
    if apart or config.qk_norm == "none":
        qk = {"norm": "none"}
    into_cache = choose(
        QKV_CACHE, QkvCase(tokens=batch, rotary=config.rotary_dim, **heads, **qk, **on), deterministic=True
    )
    paged = PagedCase(batch=batch, context=min(config.context, 256), sinks=config.sinks, **heads, **on)
    attention = choose(PAGED_ATTENTION, paged, deterministic=True)
    chosen = {"qkv_cache": into_cache.run, "norms_apart": apart, "attention": attention.run}
    return chosen, into_cache.version == attention.version == "triton"


def _latent_attention(config: ModelConfig, batch: int, on: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The same over a cache of latents."""
    mla = config.mla
    assert mla is not None
    dims: dict[str, Any] = {"heads": config.heads, "rank": mla.kv_rank, "rope_dim": mla.rope_dim, **on}
    rows: dict[str, Any] = {"batch": batch, "context": min(config.context, 256), **dims}
    inner = LatentPrefillCase(queries=64, nope_dim=mla.nope_dim, v_dim=mla.v_dim, **rows)
    chosen = {
        "latent_cache": choose(LATENT_TO_CACHE, LatentCacheCase(tokens=batch, **dims), deterministic=True),
        "latent_decode": choose(LATENT_DECODE, LatentCase(**rows), deterministic=True),
        "latent_prefill": choose(LATENT_PREFILL, inner, deterministic=True),
    }
    on_triton = all(chosen[name].version.startswith("triton") for name in ("latent_cache", "latent_decode"))
    return {name: each.run for name, each in chosen.items()}, on_triton


def _delta(config: ModelConfig, batch: int, on: dict[str, Any]) -> Any:
    """Gated delta-net layers; None where the model has none."""
    delta = config.gated_delta
    if delta is None or not config.num_recurrent_layers:
        return None
    case = DeltaRowsCase(
        sequences=batch,
        key_heads=delta.key_heads,
        values=delta.value_heads // delta.key_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        conv=delta.conv,
        **on,
    )
    return choose(DELTA_ROWS, case, deterministic=True)


def _pairs(config: ModelConfig, batch: int, on: dict[str, Any]) -> Any:
    """2-simplicial layers; None where the model has none."""
    windows = config.simplicial
    if windows is None or all(kind.attention != "2-simplicial" for kind in config.layers):
        return None
    case = PagedSimplicialCase(
        batch=batch,
        context=min(config.context, 256),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        window_1=windows.window_1,
        window_2=windows.window_2,
        **on,
    )
    return choose(PAGED_SIMPLICIAL, case, deterministic=True)


def _grouped(config: ModelConfig, batch: int, on: dict[str, Any]) -> Run | None:
    if config.moe is None:
        return None
    case = GroupedCase(
        rows=batch * config.moe.top_k,
        experts=config.moe.num_experts,
        outputs=2 * config.moe.ffn,
        inputs=config.hidden,
        **on,
    )
    chosen = choose(GROUPED_LINEAR, case, deterministic=True)
    return None if chosen.version == "eager" else chosen.run


def _moe(config: ModelConfig, op: Op, tokens: int, on: dict[str, Any], experts: Sequence[WeightFormat]) -> Run | None:
    """For plain experts, or for stacks in these formats; None where no version agrees on all of them."""
    if config.moe is None:
        return None
    case = _moe_case(config, config.moe, tokens, on)
    cases = [replace(case, packed=kind, group=group, zeros=zeros) for kind, group, zeros in experts] or [case]
    chosen = [choose(op, case, deterministic=True) for case in cases]
    if op is GROUPED_MOE:  # for many tokens stacks are dequantised
        stacks = [_stack_case(config, config.moe, format, on) for format in experts]
        chosen += [choose(DEQUANTISE_STACK, stack, deterministic=True) for stack in stacks]
    return None if any(each.version == "eager" for each in chosen) else chosen[0].run


def _stack_case(config: ModelConfig, moe: MoE, format: WeightFormat, on: dict[str, Any]) -> StackCase:
    kind, group, zeros = format
    experts, rows, columns = moe.num_experts, 2 * moe.ffn, config.hidden
    return StackCase(experts=experts, rows=rows, columns=columns, kind=kind, group=group, zeros=zeros, **on)


def _moe_case(config: ModelConfig, moe: MoE, tokens: int, on: dict[str, Any]) -> MoECase:
    return MoECase(
        tokens=tokens,
        hidden=config.hidden,
        ffn=moe.ffn,
        experts=moe.num_experts,
        top_k=moe.top_k,
        score=moe.score,
        bias=moe.expert_bias,
        activation=config.activation,
        groups=moe.groups,
        top_groups=moe.top_groups,
        selection_bias=moe.selection_bias,
        scale_input=moe.scale_input,
        normalize=moe.normalize,
        **on,
    )


def _decode_kernels(device: torch.device, *, fused: bool) -> dict[str, Any]:
    if not has_triton(device):
        return {}
    from armillary.kernels.paged.decode_inputs_triton import look_up, put
    from armillary.kernels.paged.fused_decode_triton import attend_tokens

    return {"look_up": look_up, "put": put, "tokens": attend_tokens if fused else None}


def _first(op: Op, case: Case) -> Run:
    return choose(op, case, deterministic=True).run


def _plain(config: ModelConfig, moe: Run | None) -> bool:
    """Whether the fused small GEMMs have the model's norm and activation: an RMS norm, and SwiGLU where an MLP is not
    of routed experts alone."""
    has_mlp = config.num_moe_layers < config.num_layers or (config.moe is not None and config.moe.shared_ffn > 0)
    return (
        config.norm == "rms"
        and config.norm_weight
        and not config.norm_plus_one
        and config.norm_at == "before"
        and (not has_mlp or (config.gated and config.activation == "silu"))
        and config.parallel == "none"
        and config.residual_scale == 1.0
        and (config.moe is None or (moe is not None and not config.moe.shared_gate))
    )
