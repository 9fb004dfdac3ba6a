"""A model family in a file of your own: here GPT-OSS again, under the model_type "own_gpt_oss".

    armillary plan --set model.code=examples/own_family.py --set model.path=FOLDER ...
    armillary train RECIPE --set model.code=examples/own_family.py
    armillary generate FOLDER "..." --model-code examples/own_family.py

docs/models.md goes through it line by line.
"""

from collections.abc import Mapping
from typing import Any

from armillary.spec.hf.layers import kinds
from armillary.spec.hf.rope import read_rope
from armillary.spec.hf.tensor_names import TensorNames
from armillary.spec.hf.user_family import Family
from armillary.spec.model import ModelConfig


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json to the fields of ModelConfig that are not Llama's; `armillary models NAME --json` shows a model's."""
    return {
        # one table per layer: full or sliding attention, dense MLP or experts
        "layers": kinds(raw, sliding=lambda i: i % 2 == 0, moe=lambda i: True),
        "window": raw["sliding_window"],
        "sinks": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn": 0,
        "activation": "swiglu_clamped",
        "rope": read_rope(raw, theta=150_000.0),
        "moe": {
            "num_experts": raw["num_local_experts"],
            "top_k": raw["num_experts_per_tok"],
            "ffn": raw["intermediate_size"],
            "score": "softmax_topk",
            "router_bias": True,
            "expert_bias": True,
        },
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read` needs, beside hidden_size and the like; what they cannot say is refused when a model is
    saved."""
    assert config.moe is not None
    return {
        "hidden_act": "silu",  # of the common keys this one would be written as our own name for the activation
        "sliding_window": config.window,
        "intermediate_size": config.moe.ffn,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
    }


FAMILY = Family(
    model_type="own_gpt_oss",
    read=read,
    write=write,
    architecture="OwnGptOssForCausalLM",
    tensors=TensorNames(
        norms={"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        router="mlp.router",
        stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        alternating=True,
    ),
)
