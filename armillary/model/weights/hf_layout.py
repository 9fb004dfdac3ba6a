"""How our fused tensors are made of Hugging Face's and taken apart again, family by family.

A `Rule` names one of our tensors, the tensors it is made of, and the pair of functions between them; the list of
rules of a config is the whole mapping, used in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.spec.model import ModelConfig, MoE

SELECTION_BIAS = "selection_bias"
"""of a router: a buffer, in fp32 whatever the weights are in"""
Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of our tensors, and what it is in a Hugging Face folder."""

    ours: str
    theirs: tuple[str, ...]
    join: Join
    split: Split

    def made_shape(self, shapes: Sequence[torch.Size]) -> torch.Size | None:
        """What `join` would make of tensors of these shapes; None where they do not fit together."""
        try:
            return self.join([torch.empty(shape, device="meta") for shape in shapes]).shape
        except (RuntimeError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls its parts inside `model.layers.N.`."""

    norms: dict[str, str]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = ""
    experts: tuple[str, str, str] = ("", "", "")
    """gate, up and down of expert {e}"""
    shared: tuple[str, str, str] = ("", "", "")
    """gate, up and down of the shared expert"""
    selection_bias: str = ""
    """the router's, where it has one"""


_PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_BOTH = _POST | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_LLAMA = Names(norms=_PRE)

FAMILIES: dict[str, Names] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": Names(norms=_BOTH),
    "olmo2": Names(norms=_POST),
    "phi3": Names(norms=_PRE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "mixtral": Names(
        norms=_PRE,
        router="block_sparse_moe.gate",
        experts=tuple(f"block_sparse_moe.experts.{{e}}.{w}" for w in ("w1", "w3", "w2")),  # type: ignore[arg-type]
    ),
    "qwen3_moe": Names(
        norms=_PRE,
        router="mlp.gate",
        experts=tuple(f"mlp.experts.{{e}}.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    ),
    "glm4_moe": Names(
        norms=_PRE,
        router="mlp.gate",
        experts=tuple(f"mlp.experts.{{e}}.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
        shared=tuple(f"mlp.shared_experts.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
        selection_bias="mlp.gate.e_score_correction_bias",
    ),
}


def rules(config: ModelConfig) -> list[Rule]:
    """Every tensor of the model, in the order of its layers."""
    if config.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadModel(f"{config.name}: weights of model_type '{config.family}' are not supported; these are: {known}")
    names = FAMILIES[config.family]
    found = [_same("embedding.weight", "model.embed_tokens.weight")]
    for i in range(config.num_layers):
        found += _layer_rules(config, names, i)
    if config.final_norm:
        found.append(_same("norm.weight", "model.norm.weight"))
    if not config.tied:
        found.append(_same("output.weight", "lm_head.weight"))
    return found


def _layer_rules(config: ModelConfig, names: Names, i: int) -> list[Rule]:
    ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
    found = [_same(f"{ours}{norm}.weight", f"{theirs}{name}.weight") for norm, name in names.norms.items()]
    found += _attention_rules(config, names, ours, theirs)
    if config.layers[i].mlp == "moe":
        return found + _moe_rules(config, names, ours, theirs)
    return found + _mlp_rules(config, names, ours, theirs)


def _attention_rules(config: ModelConfig, names: Names, ours: str, theirs: str) -> list[Rule]:
    found = []
    for part in ["weight", "bias"] if config.qkv_bias else ["weight"]:
        sources = tuple(f"{theirs}{name}.{part}" for name in names.qkv)
        join, split = _qkv_pair(config, stacked=len(sources) == 1)
        found.append(Rule(ours=f"{ours}attention.qkv.{part}", theirs=sources, join=join, split=split))
    for part in ["weight", "bias"] if config.out_bias else ["weight"]:
        found.append(_same(f"{ours}attention.out.{part}", f"{theirs}{names.out}.{part}"))
    if config.qk_norm != "none":
        for norm in ("q_norm", "k_norm"):
            found.append(_same(f"{ours}attention.{norm}.weight", f"{theirs}self_attn.{norm}.weight"))
    return found


def _mlp_rules(config: ModelConfig, names: Names, ours: str, theirs: str) -> list[Rule]:
    found = []
    for part in ["weight", "bias"] if config.mlp_bias else ["weight"]:
        sources = tuple(f"{theirs}{name}.{part}" for name in names.gate_up)
        join, split = _gate_up_pair(stacked=len(sources) == 1)
        found.append(Rule(ours=f"{ours}mlp.up.{part}", theirs=sources, join=join, split=split))
        found.append(_same(f"{ours}mlp.down.{part}", f"{theirs}{names.down}.{part}"))
    return found


def _moe_rules(config: ModelConfig, names: Names, ours: str, theirs: str) -> list[Rule]:
    assert config.moe is not None
    gate, up, down = names.experts
    span = range(config.moe.num_experts)
    pairs = tuple(f"{theirs}{name.format(e=e)}.weight" for e in span for name in (gate, up))
    downs = tuple(f"{theirs}{down.format(e=e)}.weight" for e in span)
    return [
        _same(f"{ours}mlp.router.weight", f"{theirs}{names.router}.weight"),
        *_shared_rules(config.moe, names, f"{ours}mlp.", theirs),
        Rule(ours=f"{ours}mlp.experts.up_E2FH", theirs=pairs, join=_join_expert_pairs, split=_split_expert_pairs),
        Rule(ours=f"{ours}mlp.experts.down_EHF", theirs=downs, join=torch.stack, split=lambda x: list(x.unbind(0))),
    ]


def _shared_rules(moe: MoE, names: Names, ours: str, theirs: str) -> list[Rule]:
    """The shared expert, and the bias that only chooses."""
    found = []
    if moe.selection_bias:
        found.append(_same(f"{ours}router.{SELECTION_BIAS}", f"{theirs}{names.selection_bias}"))
    if moe.shared_ffn:
        gate, up, down = (f"{theirs}{name}.weight" for name in names.shared)
        join, split = _gate_up_pair(stacked=False)
        found.append(Rule(ours=f"{ours}shared.up.weight", theirs=(gate, up), join=join, split=split))
        found.append(_same(f"{ours}shared.down.weight", down))
    return found


def _same(ours: str, theirs: str) -> Rule:
    return Rule(ours=ours, theirs=(theirs,), join=lambda parts: parts[0], split=lambda x: [x])


# --- queries, keys and values: grouped per KV head as [q…, k, v]


def _qkv_pair(config: ModelConfig, *, stacked: bool) -> tuple[Join, Split]:
    kv_heads, dim, group = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    sizes = [config.heads * dim, kv_heads * dim, kv_heads * dim]

    def join(parts: Sequence[Tensor]) -> Tensor:
        q, k, v = parts[0].split(sizes) if stacked else parts
        grouped = [x.unflatten(0, (kv_heads, count, dim)) for x, count in ((q, group), (k, 1), (v, 1))]
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def split(fused: Tensor) -> list[Tensor]:
        grouped = fused.unflatten(0, (kv_heads, group + 2, dim))
        parts = [grouped[:, :group].flatten(0, 2), grouped[:, group].flatten(0, 1), grouped[:, group + 1].flatten(0, 1)]
        return [torch.cat(parts)] if stacked else parts

    return join, split


# --- gate and up: rows alternate


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _gate_up_pair(*, stacked: bool) -> tuple[Join, Split]:
    def join(parts: Sequence[Tensor]) -> Tensor:
        gate, up = parts[0].chunk(2) if stacked else parts
        return interleave(gate, up)

    def split(fused: Tensor) -> list[Tensor]:
        gate, up = fused[0::2], fused[1::2]
        return [torch.cat((gate, up))] if stacked else [gate, up]

    return join, split


def _join_expert_pairs(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([interleave(gate, up) for gate, up in zip(parts[0::2], parts[1::2], strict=True)])


def _split_expert_pairs(fused: Tensor) -> list[Tensor]:
    return [half for expert in fused.unbind(0) for half in (expert[0::2], expert[1::2])]
