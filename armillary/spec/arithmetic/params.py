"""Exact parameter counts of a ModelConfig, and the size of its KV cache.

Counts follow the tensors of the module in `armillary.model`, so they equal `sum(p.numel())` on the meta device.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from armillary.spec.model import LayerKind, ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer, by part: projections with their biases and sinks, norms around the sub-layers and inside
    attention, the shared expert with its gate; a router's selection bias is a buffer and not counted. `unvisited` are
    the routed experts that one token does not use, `multiplied` the weights of the GEMMs of one token."""

    attention: int
    mlp: int = 0
    router: int = 0
    experts: int = 0
    shared: int = 0
    norms: int
    unvisited: int = 0
    multiplied: int

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.router + self.experts + self.shared + self.norms

    @property
    def active(self) -> int:
        return self.total - self.unvisited


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, by part; a token uses the `active` ones, all but its unused experts."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    router: int
    experts: int
    shared: int
    norms: int
    head: int
    """the output projection and its bias; its weight is the embedding's when tied"""
    total: int
    active: int
    multiplied: int
    """the N of 6·N FLOPs: weights of the GEMMs of one token, output projection included, tied or not"""


@lru_cache(maxsize=64)
def parameters(config: ModelConfig) -> Parameters:
    """Every parameter of the model, once."""
    layers = [(_layer(config, kind), count) for kind, count in Counter(config.layers).items()]

    def over_layers(part: str) -> int:
        return sum(getattr(layer, part) * count for layer, count in layers)

    table = config.vocab * config.hidden
    parts = {part: over_layers(part) for part in ("attention", "mlp", "router", "experts", "shared", "norms")}
    parts["norms"] += _norm(config) * config.final_norm
    parts["embedding"] = table
    parts["positions"] = config.learned_positions * config.hidden if config.positions == "learned" else 0
    parts["head"] = table * (not config.tied) + config.vocab * config.head_bias
    total = sum(parts.values())
    return Parameters(
        **parts, total=total, active=total - over_layers("unvisited"), multiplied=over_layers("multiplied") + table
    )


def layer_parameters(config: ModelConfig, index: int) -> LayerParameters:
    """Every parameter of layer `index`."""
    return _layer(config, config.layers[index])


def _layer(config: ModelConfig, kind: LayerKind) -> LayerParameters:
    matrices, vectors = _attention(config, kind)
    attention, norms = matrices + vectors, _layer_norms(config, kind)
    if kind.mlp == "moe":
        return _moe_layer(config, attention, norms, multiplied=matrices)
    up_rows = config.ffn * (2 if config.gated else 1)
    mlp = (up_rows + config.ffn) * config.hidden
    biases = (up_rows + config.hidden) * config.mlp_bias
    return LayerParameters(attention=attention, norms=norms, mlp=mlp + biases, multiplied=matrices + mlp)


def _moe_layer(config: ModelConfig, attention: int, norms: int, *, multiplied: int) -> LayerParameters:
    moe, hidden = config.moe, config.hidden
    assert moe is not None
    router = moe.num_experts * hidden
    expert = 3 * moe.ffn * hidden
    expert_biases = (2 * moe.ffn + hidden) * moe.expert_bias
    shared = 3 * moe.shared_ffn * hidden + hidden * moe.shared_gate
    return LayerParameters(
        attention=attention,
        norms=norms,
        router=router + moe.num_experts * moe.router_bias,
        experts=moe.num_experts * (expert + expert_biases),
        shared=shared,
        unvisited=(moe.num_experts - moe.top_k) * (expert + expert_biases),
        multiplied=multiplied + router + moe.top_k * expert + shared,
    )


def _attention(config: ModelConfig, kind: LayerKind) -> tuple[int, int]:
    """(entries of the projections, entries of biases and sinks)."""
    sinks = config.heads * config.sinks
    if kind.attention == "gated_delta":
        return _gated_delta(config)
    if _is_latent(config, kind):
        matrices, biases = _latent_attention(config)
        return matrices, biases + sinks
    keys_and_values = 4 if kind.attention == "2-simplicial" else 2
    rows = (config.heads * (1 + config.attention_gate) + keys_and_values * config.kv_heads) * config.head_dim
    matrices = (rows + config.heads * config.head_dim) * config.hidden
    return matrices, rows * config.qkv_bias + config.hidden * config.out_bias + sinks


def _gated_delta(config: ModelConfig) -> tuple[int, int]:
    """Gated delta-net (arXiv:2412.06464): one projection of the inputs, one back; a convolution, and two weights per
    value head."""
    delta = config.gated_delta
    assert delta is not None
    values = delta.value_heads * delta.value_dim
    inputs = delta.channels + values + 2 * delta.value_heads
    return (inputs + values) * config.hidden, delta.channels * delta.conv + 2 * delta.value_heads


def _latent_attention(config: ModelConfig) -> tuple[int, int]:
    """DeepSeek-V2 (arXiv:2405.04434, section 2.1): low-rank down and up projections of queries and of keys/values."""
    mla, hidden, heads = config.mla, config.hidden, config.heads
    assert mla is not None
    query_rows = heads * (mla.nope_dim + mla.rope_dim)
    query = mla.q_rank * (hidden + query_rows) if mla.q_rank else hidden * query_rows
    down_rows = mla.kv_rank + mla.rope_dim
    up = mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
    biases = ((mla.q_rank or 0) + down_rows) * config.qkv_bias + hidden * config.out_bias
    return query + hidden * down_rows + up + heads * mla.v_dim * hidden, biases


def _layer_norms(config: ModelConfig, kind: LayerKind) -> int:
    around = {"before": 1 if config.parallel == "one_norm" else 2, "after": 2, "both": 4}[config.norm_at]
    return around * _norm(config) + _inner_norms(config, kind)


def _inner_norms(config: ModelConfig, kind: LayerKind) -> int:
    """Norms inside attention, weights only: of the latent ranks, of queries and keys, or of a delta-net's outputs."""
    if kind.attention == "gated_delta":
        assert config.gated_delta is not None
        return config.gated_delta.value_dim
    if _is_latent(config, kind):
        assert config.mla is not None
        return (config.mla.q_rank or 0) + config.mla.kv_rank
    if config.qk_norm == "none" or config.qk_norm_kind == "plain":
        return 0
    return {"head": 2, "all": config.heads + config.kv_heads}[config.qk_norm] * config.head_dim


def _norm(config: ModelConfig) -> int:
    return config.hidden * (config.norm_weight + (config.norm == "layer" and config.norm_bias))


def _is_latent(config: ModelConfig, kind: LayerKind) -> bool:
    return config.mla is not None and kind.attention != "2-simplicial"


# --- the KV cache


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int = 2) -> int:
    """KV-cache bytes of one more token while no window is full."""
    return kv_bytes(config, 1, dtype_bytes)


def kv_bytes(config: ModelConfig, context: int, dtype_bytes: int = 2) -> int:
    """KV cache of one sequence of `context` tokens: windowed layers store their window, latent ones the latent."""
    counts = Counter(kind.attention for kind in config.layers)
    return sum(count * _cached_entries(config, attention, context) for attention, count in counts.items()) * dtype_bytes


def state_bytes(config: ModelConfig, dtype_bytes: int = 2) -> int:
    """Recurrent states of one sequence, whatever its length: matrices in fp32, and the last inputs of convolutions."""
    delta = config.gated_delta
    if delta is None:
        return 0
    matrices = delta.value_heads * delta.key_dim * delta.value_dim
    return config.num_recurrent_layers * (4 * matrices + (delta.conv - 1) * delta.channels * dtype_bytes)


def _cached_entries(config: ModelConfig, attention: str, context: int) -> int:
    if attention == "gated_delta":
        return 0
    key_and_value = 2 * config.kv_heads * config.head_dim
    if attention == "2-simplicial":
        assert config.simplicial is not None
        windows = (config.simplicial.window_1, config.simplicial.window_2)
        return sum(min(context, window) for window in windows) * key_and_value
    if attention in ("sliding", "chunked"):
        assert config.window is not None
        context = min(context, config.window)
    if config.mla is not None:
        return context * (config.mla.kv_rank + config.mla.rope_dim)
    return context * key_and_value
