"""The shapes that a training run asks its kernels for: one case for each kind of layer, as one rank sees it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from armillary.kernels.core.op import Case
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16"}
_DOCUMENTS = 8
"""documents a packed row is taken to hold"""


@dataclass(frozen=True)
class Wanted:
    """A function that layers need: its name in the choices of a run, the operation by its name in kernels.ops, and
    the shape it will mostly be called with."""

    name: str
    op: str
    case: Case


def attention_name(window: int | tuple[int, int] | None, *, documents: bool) -> str:
    """'attention', 'attention, window 1024, documents', '2-simplicial attention, windows 32 × 512' …"""
    name = f"attention, window {window}" if window else "attention"
    if isinstance(window, tuple):
        name = f"2-simplicial attention, windows {window[0]} × {window[1]}"
    return name + (", documents" if documents else "")


def wanted(config: ModelConfig, job: TrainJob, layout: Layout, *, device: torch.device) -> Iterator[Wanted]:
    shared: dict[str, Any] = {"dtype": _DTYPES[layout.precision], "device": device.type}
    tokens = max(1, layout.micro_batch * job.sequence // layout.cp)
    yield from _norms(config, layout, tokens, shared)
    yield from _layers(config, layout, tokens, shared)
    yield from _attention(config, job, layout, shared)
    if not config.head_bias and layout.tp == 1:
        from armillary.kernels.loss.linear_cross_entropy import LinearCrossEntropyCase

        softcap = config.logit_softcap or 0.0
        case = LinearCrossEntropyCase(
            tokens=tokens, hidden=config.hidden, vocab=config.vocab, softcap=softcap, **shared
        )
        yield Wanted("linear_cross_entropy", "linear_cross_entropy", case)


def _norms(config: ModelConfig, layout: Layout, tokens: int, shared: dict[str, Any]) -> Iterator[Wanted]:
    from armillary.kernels.norm.norm import NormCase

    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    bias = config.norm == "layer" and config.norm_bias
    kind: dict[str, Any] = {"kind": config.norm, "plus_one": config.norm_plus_one}
    case = NormCase(rows=rows, columns=config.hidden, weight=config.norm_weight, bias=bias, **kind, **shared)
    yield Wanted("norm", "norm", case)
    yield Wanted("add_norm", "add_norm", case)
    if config.qk_norm == "head":
        rows, weight = tokens * config.heads // layout.tp, config.qk_norm_kind == "weight"
        yield Wanted("head_norm", "norm", NormCase(rows=rows, columns=config.head_dim, weight=weight, **kind, **shared))


def _layers(config: ModelConfig, layout: Layout, tokens: int, shared: dict[str, Any]) -> Iterator[Wanted]:
    from armillary.kernels.pointwise.activation import ActivationCase
    from armillary.kernels.pointwise.rope import RopeCase

    ffn = config.moe.ffn if config.moe is not None and not config.ffn else config.ffn
    case = ActivationCase(rows=tokens, ffn=ffn // layout.tp, activation=config.activation, gated=config.gated, **shared)
    yield Wanted("activate", "activate", case)
    if config.moe is not None and config.num_moe_layers:
        from armillary.kernels.gemm.grouped import GroupedCase

        moe = config.moe
        grouped = GroupedCase(
            rows=tokens * moe.top_k,
            experts=moe.num_experts // layout.ep,
            outputs=2 * moe.ffn // layout.expert_tp,
            inputs=config.hidden,
            **shared,
        )
        yield Wanted("grouped_linear", "grouped_linear", grouped)
    if config.positions == "rope" and config.mla is None:
        rope = RopeCase(
            tokens=tokens,
            heads=config.heads // layout.tp,
            kv_heads=config.kv_heads // layout.tp,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            interleaved=config.rope.interleaved,
            **shared,
        )
        yield Wanted("rope", "rope", rope)


def _attention(config: ModelConfig, job: TrainJob, layout: Layout, shared: dict[str, Any]) -> Iterator[Wanted]:
    """Full and sliding layers, each with rows of one document and of several; ALiBi keeps its plain form, and latent
    attention, whose values have their own head dim, torch's."""
    from armillary.kernels.attention.attention import AttentionCase

    if config.positions == "alibi" or config.mla is not None or layout.cp > 1:
        return
    yield from _simplicial(config, job, layout, shared)
    ones = (kind for kind in config.layers if kind.attention != "2-simplicial")
    windows = {config.window if kind.attention == "sliding" else None for kind in ones}
    for window in sorted(windows, key=lambda window: window or 0):
        for documents in (False, True):
            case = AttentionCase(
                batch=layout.micro_batch,
                length=job.sequence,
                heads=config.heads // layout.tp,
                kv_heads=config.kv_heads // layout.tp,
                head_dim=config.head_dim,
                documents=_DOCUMENTS if documents else 0,
                window=window if window is not None and window < job.sequence else 0,
                softcap=config.attention_softcap or 0.0,
                sinks=config.sinks,
                **shared,
            )
            yield Wanted(attention_name(window, documents=documents), "attention", case)


def _simplicial(config: ModelConfig, job: TrainJob, layout: Layout, shared: dict[str, Any]) -> Iterator[Wanted]:
    """2-simplicial layers, with rows of one document and of several."""
    from armillary.kernels.simplicial.simplicial import SimplicialCase

    if all(kind.attention != "2-simplicial" for kind in config.layers):
        return
    assert config.simplicial is not None
    windows = (config.simplicial.window_1, config.simplicial.window_2)
    for documents in (False, True):
        case = SimplicialCase(
            batch=layout.micro_batch,
            length=job.sequence,
            heads=config.heads // layout.tp,
            kv_heads=config.kv_heads // layout.tp,
            head_dim=config.head_dim,
            window_1=windows[0],
            window_2=windows[1],
            documents=_DOCUMENTS if documents else 0,
            **shared,
        )
        yield Wanted(attention_name(windows, documents=documents), "simplicial", case)
