"""How a family names its tensors in a Hugging Face folder."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of a family's tensors inside `model.layers.N.`, without `.weight`; those of embedding, last norm and head
    are the same everywhere."""

    norms: dict[str, str]
    """norm of our block (attention_norm, attention_post_norm, mlp_norm, mlp_post_norm) -> its name"""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """queries, keys and values; one name: all three in one tensor"""
    out: str = "self_attn.o_proj"
    """attention's output projection"""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """of a dense MLP; one name: both in one tensor, the gate first"""
    down: str = "mlp.down_proj"
    """of a dense MLP"""
    router: str = ""
    """of a layer with experts"""
    experts: tuple[str, str, str] = ("", "", "")
    """gate, up and down of expert {e}, where experts are stored one by one"""
    stacked: tuple[str, str] = ("", "")
    """gate_up [E, H, 2F] and down [E, F, H] of all experts, where these are stored in one tensor each; biases are named
    NAME_bias"""
    alternating: bool = False
    """gate and up columns alternate in a stacked gate_up; else gates come first"""
    shared: tuple[str, str, str] = ("", "", "")
    """gate, up and down of the shared expert"""
    shared_gate: str = ""
    """of the shared expert's sigmoid gate"""
    gated_delta: str = ""
    """of gated delta-net layers"""
    delta_inputs: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
    """in them: queries, keys, values and gates of each key head, then β and decays; or in_proj_qkv, in_proj_z,
    in_proj_b and in_proj_a, each of all heads"""
    mtp: str = ""
    """prefix of the layer for multi-token prediction, where it is not numbered after the last: 'mtp.'"""
    selection_bias: str = ""
    """of the router, in full"""
