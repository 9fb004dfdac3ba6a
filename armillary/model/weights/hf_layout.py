"""How our fused tensors are built from Hugging Face's and split again, by model family.

A `Rule` names one of our tensors, the Hugging Face tensors it is built from, and the functions in both directions; the
list of rules of a config is the complete mapping.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from armillary.errors import BadModel
from armillary.model.weights.fused_rows import (
    Join,
    Split,
    gate_up_pair,
    grouped_pair,
    join_gate_ups,
    join_stacked,
    qkv_pair,
    split_gate_ups,
    split_stacked,
    transposed,
    transposed_back,
)
from armillary.model.weights.gated_rows import conv_pair, inputs_pair
from armillary.spec.hf.tensor_names import TensorNames
from armillary.spec.hf.user_family import find_family
from armillary.spec.model import LayerKind, ModelConfig, MoE

SELECTION_BIAS = "selection_bias"
"""a router's buffer, in fp32 for every dtype of the weights"""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of our tensors, and its tensors in a Hugging Face folder."""

    name: str
    hf_names: tuple[str, ...]
    join: Join
    split: Split
    transposed: bool = False
    """its one stored tensor has the two last dims exchanged: [E, inputs, outputs]"""

    def joined_shape(self, shapes: Sequence[torch.Size]) -> torch.Size | None:
        """The shape that `join` would give for tensors of these shapes; None where they do not fit together."""
        try:
            return self.join([torch.empty(shape, device="meta") for shape in shapes]).shape
        except (RuntimeError, ValueError):
            return None


_PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_BOTH = _POST | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_LLAMA = TensorNames(norms=_PRE)

_LLAMA4 = TensorNames(
    norms=_PRE,
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    stacked=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    shared=tuple(f"feed_forward.shared_expert.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
)
_DEEPSEEK = TensorNames(
    norms=_PRE,
    router="mlp.gate",
    experts=tuple(f"mlp.experts.{{e}}.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    shared=tuple(f"mlp.shared_experts.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    selection_bias="mlp.gate.e_score_correction_bias",
)

_QWEN3_NEXT = TensorNames(
    norms=_PRE,
    router="mlp.gate",
    experts=tuple(f"mlp.experts.{{e}}.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    shared=tuple(f"mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    shared_gate="mlp.shared_expert_gate",
    gated_delta="linear_attn",
    mtp="mtp.",
)
_QWEN3_5 = replace(_QWEN3_NEXT, delta_inputs=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))

FAMILIES: dict[str, TensorNames] = {
    "llama": _LLAMA,
    "simplicial": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": TensorNames(norms=_BOTH),
    "olmo2": TensorNames(norms=_POST),
    "phi3": TensorNames(norms=_PRE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "mixtral": TensorNames(
        norms=_PRE,
        router="block_sparse_moe.gate",
        experts=tuple(f"block_sparse_moe.experts.{{e}}.{w}" for w in ("w1", "w3", "w2")),  # type: ignore[arg-type]
    ),
    "qwen3_moe": TensorNames(
        norms=_PRE,
        router="mlp.gate",
        experts=tuple(f"mlp.experts.{{e}}.{w}_proj" for w in ("gate", "up", "down")),  # type: ignore[arg-type]
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4_moe": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": TensorNames(
        norms=_PRE,
        router="mlp.router",
        stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        alternating=True,
    ),
    "llama4_text": _LLAMA4,
    "llama4": _LLAMA4,
}


def rules(config: ModelConfig) -> list[Rule]:
    """Every tensor of the model, in the order of its layers."""
    family = None if config.family in FAMILIES else find_family(config.family)
    if family is not None and family.rules is not None:
        return list(family.rules(config))
    return list(_rules(config, tensor_names(config)))


def tensor_names(config: ModelConfig) -> TensorNames:
    names = FAMILIES.get(config.family)
    if names is None and (family := find_family(config.family)) is not None:
        names = family.tensors
    if names is None:
        known = ", ".join(FAMILIES)
        raise BadModel(
            f"{config.name}: weights of model_type '{config.family}' are not supported; these are: {known}, and your "
            "own with --model-code FILE"
        )
    return names


def _rules(config: ModelConfig, names: TensorNames) -> Iterator[Rule]:
    yield _same("embedding.weight", "model.embed_tokens.weight")
    for i, layer in enumerate(config.layers):
        yield from _block_rules(config, names, layer, f"blocks.{i}.", f"model.layers.{i}.")
    if config.final_norm:
        yield _same("norm.weight", "model.norm.weight")
    if not config.tied:
        yield _same("output.weight", "lm_head.weight")


def _block_rules(
    config: ModelConfig, names: TensorNames, layer: LayerKind, prefix: str, hf_prefix: str
) -> Iterator[Rule]:
    for norm, name in names.norms.items():
        yield _same(f"{prefix}{norm}.weight", f"{hf_prefix}{name}.weight")
    if layer.attention == "gated_delta":
        yield from _gated_delta_rules(config, names, prefix, hf_prefix)
    elif config.mla:
        yield from _latent_rules(config, names, prefix, hf_prefix)
    else:
        in_pairs = layer.attention == "2-simplicial"
        yield from _attention_rules(config, _of_pairs(names) if in_pairs else names, prefix, hf_prefix)
    yield from (_moe_rules if layer.mlp == "moe" else _mlp_rules)(config, names, prefix, hf_prefix)


def mtp_rules(config: ModelConfig, depth: int) -> list[Rule]:
    """The tensors of the layer after the last that predicts `depth` + 1 tokens further (`multi_token.MtpLayer`); copies
    of the embedding and the head, which some folders have there too, are those of the model."""
    names = tensor_names(config)
    prefix = f"model.layers.{config.num_layers + depth}."
    own = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
    block = prefix
    if names.mtp:
        prefix, block = names.mtp, f"{names.mtp}layers.{depth}."
        own = {
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "join": "fc",
            "norm": "norm",
        }
    rules_of_block = _block_rules(config, names, config.mtp_kind, "block.", block)
    return [*(_same(f"{name}.weight", f"{prefix}{hf_name}.weight") for name, hf_name in own.items()), *rules_of_block]


def num_mtp_layers(config: ModelConfig, has: Callable[[str], bool]) -> int:
    """How many a folder holds; `has` says whether a tensor is in it."""
    if prefix := _mtp_prefix(config):
        return int(is_joined(f"{prefix}fc", has))  # one join, so one layer
    count = 0
    while is_mtp_layer(config.num_layers + count, has):
        count += 1
    return count


def _mtp_prefix(config: ModelConfig) -> str:
    names = FAMILIES.get(config.family)
    return "" if names is None else names.mtp


def is_of_mtp_layer(name: str, config: ModelConfig, has: Callable[[str], bool]) -> bool:
    """Whether a Hugging Face tensor is of a multi-token-prediction layer, after the model's own; `has` says whether a
    tensor is in the folder."""
    if (own := _mtp_prefix(config)) and name.startswith(own):
        return True
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4 or not parts[2].isdecimal():
        return False
    return int(parts[2]) >= config.num_layers and is_mtp_layer(int(parts[2]), has)


def is_mtp_layer(number: int, has: Callable[[str], bool]) -> bool:
    """Whether a folder's layer of this number is one: it has the join, plain or packed."""
    return is_joined(f"model.layers.{number}.eh_proj", has)


def is_joined(linear: str, has: Callable[[str], bool]) -> bool:
    return any(has(f"{linear}.{name}") for name in ("weight", "weight_packed", "qweight"))


def _attention_rules(config: ModelConfig, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    for part in ["weight", "bias"] if config.qkv_bias else ["weight"]:
        sources = tuple(f"{hf_prefix}{name}.{part}" for name in names.qkv)
        join, split = grouped_pair(config) if len(sources) > 3 else qkv_pair(config, stacked=len(sources) == 1)
        yield Rule(name=f"{prefix}attention.qkv.{part}", hf_names=sources, join=join, split=split)
    for part in ["weight", "bias"] if config.out_bias else ["weight"]:
        yield _same(f"{prefix}attention.out.{part}", f"{hf_prefix}{names.out}.{part}")
    if config.sinks:
        yield _same(f"{prefix}attention.sinks_N", f"{hf_prefix}self_attn.sinks")
    has_weights = config.qk_norm != "none" and config.qk_norm_kind == "weight"
    for norm in ("q_norm", "k_norm") if has_weights else ():
        yield _same(f"{prefix}attention.{norm}.weight", f"{hf_prefix}self_attn.{norm}.weight")


def _of_pairs(names: TensorNames) -> TensorNames:
    """Two projections of keys and two of values: k1_proj, k2_proj, v1_proj, v2_proj."""
    attention = names.out.rpartition(".")[0]
    return replace(names, qkv=tuple(f"{attention}.{name}_proj" for name in ("q", "k1", "k2", "v1", "v2")))


def _latent_rules(config: ModelConfig, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    assert config.mla is not None
    for part in ["weight", "bias"] if config.out_bias else ["weight"]:
        yield _same(f"{prefix}attention.out.{part}", f"{hf_prefix}{names.out}.{part}")
    downs = {"kv_down": "kv_a_proj_with_mqa"} | ({"q_down": "q_a_proj"} if config.mla.q_rank else {})
    for name, hf_name in downs.items():
        for part in ["weight", "bias"] if config.qkv_bias else ["weight"]:
            yield _same(f"{prefix}attention.{name}.{part}", f"{hf_prefix}self_attn.{hf_name}.{part}")
    ups = {"kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    ups |= {"q_norm": "q_a_layernorm", "q": "q_b_proj"} if config.mla.q_rank else {"q": "q_proj"}
    for name, hf_name in ups.items():
        yield _same(f"{prefix}attention.{name}.weight", f"{hf_prefix}self_attn.{hf_name}.weight")


def _gated_delta_rules(config: ModelConfig, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    delta = config.gated_delta
    assert delta is not None
    theirs = f"{hf_prefix}{names.gated_delta}."
    sources = tuple(f"{theirs}{name}.weight" for name in names.delta_inputs)
    join, split = inputs_pair(delta, apart=len(sources) > 2)
    yield Rule(name=f"{prefix}attention.qkv.weight", hf_names=sources, join=join, split=split)
    join, split = conv_pair(delta)
    yield Rule(name=f"{prefix}attention.conv_CW", hf_names=(f"{theirs}conv1d.weight",), join=join, split=split)
    same = {
        "log_rate_V": "A_log",
        "rate_bias_V": "dt_bias",
        "norm.weight": "norm.weight",
        "out.weight": "out_proj.weight",
    }
    for name, hf_name in same.items():
        yield _same(f"{prefix}attention.{name}", theirs + hf_name)


def _mlp_rules(config: ModelConfig, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    for part in ["weight", "bias"] if config.mlp_bias else ["weight"]:
        sources = tuple(f"{hf_prefix}{name}.{part}" for name in names.gate_up)
        join, split = gate_up_pair(stacked=len(sources) == 1)
        yield Rule(name=f"{prefix}mlp.up.{part}", hf_names=sources, join=join, split=split)
        yield _same(f"{prefix}mlp.down.{part}", f"{hf_prefix}{names.down}.{part}")


def _moe_rules(config: ModelConfig, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    """Router with its selection bias, shared expert, routed experts."""
    moe = config.moe
    assert moe is not None
    for part in ["weight", "bias"] if moe.router_bias else ["weight"]:
        yield _same(f"{prefix}mlp.router.{part}", f"{hf_prefix}{names.router}.{part}")
    if moe.selection_bias:
        yield _same(f"{prefix}mlp.router.{SELECTION_BIAS}", f"{hf_prefix}{names.selection_bias}")
    if moe.shared_ffn:
        gate, up, down = (f"{hf_prefix}{name}.weight" for name in names.shared)
        join, split = gate_up_pair(stacked=False)
        yield Rule(name=f"{prefix}mlp.shared.up.weight", hf_names=(gate, up), join=join, split=split)
        yield _same(f"{prefix}mlp.shared.down.weight", down)
    if moe.shared_gate:
        yield _same(f"{prefix}mlp.shared_gate.weight", f"{hf_prefix}{names.shared_gate}.weight")
    if names.stacked[0]:
        yield from _stacked_rules(moe, names, f"{prefix}mlp.experts.", hf_prefix)
        return
    gate, up, down = names.experts
    experts = range(moe.num_experts)
    gate_ups = tuple(f"{hf_prefix}{name.format(e=e)}.weight" for e in experts for name in (gate, up))
    downs = tuple(f"{hf_prefix}{down.format(e=e)}.weight" for e in experts)
    yield Rule(name=f"{prefix}mlp.experts.up_E2FH", hf_names=gate_ups, join=join_gate_ups, split=split_gate_ups)
    yield Rule(
        name=f"{prefix}mlp.experts.down_EHF", hf_names=downs, join=torch.stack, split=lambda x: list(x.unbind(0))
    )


def _stacked_rules(moe: MoE, names: TensorNames, prefix: str, hf_prefix: str) -> Iterator[Rule]:
    """Experts as [E, inputs, outputs], and their biases."""
    gate_up, down = (f"{hf_prefix}{name}" for name in names.stacked)
    join, split = (transposed, transposed_back) if names.alternating else (join_stacked, split_stacked)
    yield Rule(name=f"{prefix}up_E2FH", hf_names=(gate_up,), join=join, split=split, transposed=True)
    yield Rule(name=f"{prefix}down_EHF", hf_names=(down,), join=transposed, split=transposed_back, transposed=True)
    if moe.expert_bias:
        if not names.alternating:
            raise BadModel("biases of stacked experts whose gates come first have no names; give the family rules")
        yield _same(f"{prefix}up_bias_E2F", f"{gate_up}_bias")
        yield _same(f"{prefix}down_bias_EH", f"{down}_bias")


def _same(name: str, hf_name: str) -> Rule:
    return Rule(name=name, hf_names=(hf_name,), join=lambda parts: parts[0], split=lambda x: [x])
