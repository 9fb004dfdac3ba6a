"""ModelConfig: the shape of a decoder-only transformer, shared by planning, training and serving.

One frozen dataclass describes any catalogue model or Hugging Face folder; variation between layers is one tuple of
layer kinds. `armillary.model` raises on what it cannot build; planning still counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from armillary.errors import BadModel

Attention = Literal["full", "sliding", "chunked", "2-simplicial", "gated_delta"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Parts of one layer; chunked attention stays within its chunk, gated_delta keeps a recurrent state instead of keys
    and values, and rope=False is NoPE."""

    attention: Attention = "full"
    mlp: Literal["dense", "moe"] = "dense"
    rope: bool = True


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions and their scaling beyond the original context."""

    theta: float = 10_000.0
    """base of the inverse frequencies"""
    local_theta: float | None = None
    """base used by sliding layers, where it differs (Gemma 3)"""
    fraction: float = 1.0
    """share of the head dim that is rotated (partial rotary)"""
    interleaved: bool = False
    """rotate pairs (2i, 2i+1) rather than halves (i, i + d/2)"""
    scaling: RopeScaling = "none"
    """rule that scales the frequencies"""
    factor: float = 1.0
    """factor by which the original context is extended"""
    original_context: int | None = None
    """context before scaling"""
    low_freq_factor: float = 1.0
    """llama3: longest unscaled wavelength divisor"""
    high_freq_factor: float = 4.0
    """llama3: shortest scaled wavelength divisor"""
    beta_fast: float = 32.0
    """yarn: rotations above which a frequency is unchanged"""
    beta_slow: float = 1.0
    """yarn: rotations below which a frequency is interpolated"""
    mscale: float | None = None
    """yarn: numerator of the attention factor (DeepSeek)"""
    mscale_all_dim: float | None = None
    """yarn: denominator of the attention factor; also scales the softmax (DeepSeek)"""
    truncate: bool = True
    """yarn: round the correction range to integer dims"""
    attention_factor: float | None = None
    """multiplies cos and sin; None derives it from the rule"""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor per frequency up to the original context"""
    long_factors: tuple[float, ...] = ()
    """longrope: divisor per frequency beyond the original context"""


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts: the experts and their routing."""

    num_experts: int
    """routed experts"""
    top_k: int
    """routed experts per token"""
    ffn: int
    """inner size of one routed expert"""
    shared_ffn: int = 0
    """inner size of the shared expert(s) together; 0: none"""
    shared_gate: bool = False
    """a sigmoid gate on the shared expert (Qwen2-MoE)"""
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    """over all experts, per expert, or over the chosen ones only (GPT-OSS)"""
    normalize: bool = True
    """chosen scores are divided by their sum"""
    routed_scale: float = 1.0
    """multiplies the routed experts' output (DeepSeek)"""
    selection_bias: bool = False
    """a per-expert bias used only for selection (loss-free balancing)"""
    groups: int = 1
    """expert groups for group-limited routing"""
    top_groups: int = 1
    """groups a token may reach"""
    scale_input: bool = False
    """the score multiplies the expert's input instead of its output (Llama 4)"""
    router_bias: bool = False
    """bias on the router"""
    expert_bias: bool = False
    """biases inside the experts (GPT-OSS)"""
    aux_loss: float = 0.0
    """weight of the load-balance loss in training"""


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2): keys and values from one low-rank latent."""

    q_rank: int | None
    """rank of the query projection; None: full rank"""
    kv_rank: int
    """rank of the cached latent"""
    nope_dim: int
    """head dim without positions"""
    rope_dim: int
    """head dim with rotary positions, its key shared by all heads"""
    v_dim: int
    """head dim of the values"""


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta-net layers (arXiv 2412.06464): a matrix [key_dim, value_dim] per value head instead of a KV cache."""

    key_heads: int
    """heads of queries and keys"""
    value_heads: int
    """heads of values, gates and states: a multiple of key_heads"""
    key_dim: int
    """size of a query and of a key"""
    value_dim: int
    """size of a value"""
    conv: int = 4
    """tokens that the causal convolution of queries, keys and values sees, its own included"""

    @property
    def channels(self) -> int:
        """Queries, keys and values together: what is convolved."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Simplicial:
    """2-simplicial attention: each query attends to pairs (i, j) inside two windows."""

    window_1: int
    """window of the first key"""
    window_2: int
    """window of the second key"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    name: str = "custom"
    """catalogue name, or the folder's own name"""
    family: str = "llama"
    """Hugging Face model_type it is read from and written as"""
    hidden: int
    """width of the residual stream"""
    heads: int
    """query heads"""
    kv_heads: int
    """key/value heads (= heads: MHA, 1: MQA)"""
    head_dim: int
    """size of one head"""
    ffn: int
    """inner size of the dense MLP"""
    vocab: int
    """rows of the embedding"""
    context: int
    """longest sequence the model was trained for"""
    layers: tuple[LayerKind, ...]
    """kind of each layer"""
    tied: bool = False
    """the output projection is the embedding"""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm"""
    norm_eps: float = 1e-5
    """added to the mean square or variance"""
    norm_bias: bool = False
    """LayerNorm has a bias"""
    norm_weight: bool = True
    """norms have a weight (OLMo-1 has none)"""
    norm_plus_one: bool = False
    """norm weights are stored as w - 1 (Gemma)"""
    norm_at: Literal["before", "after", "both"] = "before"
    """norm the input of a sub-layer, its output, or both"""
    final_norm: bool = True
    """a norm before the output projection"""
    parallel: Literal["none", "one_norm", "two_norms"] = "none"
    """attention and MLP read the same input, through one norm or one each"""
    embedding_scale: float = 1.0
    """multiplies the embeddings"""
    residual_scale: float = 1.0
    """multiplies what each sub-layer adds (Granite)"""
    attention_scale: float | None = None
    """multiplies q·k; None: head_dim ** -0.5"""
    logit_scale: float = 1.0
    """multiplies the logits"""
    attention_softcap: float | None = None
    """c·tanh(x/c) on attention scores"""
    logit_softcap: float | None = None
    """c·tanh(x/c) on logits"""
    activation: Activation = "silu"
    """of the MLP"""
    gated: bool = True
    """activation(gate) * up, rather than activation(up)"""
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    """position encoding"""
    learned_positions: int = 0
    """rows of the position table when learned"""
    alibi_max: float = 8.0
    """ALiBi slopes are 2^(-alibi_max·i/heads)"""
    rope: Rope = field(default_factory=Rope)
    """rotary positions"""
    qk_norm: Literal["none", "head", "all"] = "none"
    """norm of queries and keys per head, or over the full projection"""
    qk_norm_kind: Literal["weight", "plain"] = "weight"
    """with a weight, or without one and only on layers with rotary positions (Llama 4)"""
    qkv_clip: float | None = None
    """clamps the fused projection (MPT, OLMo, DBRX)"""
    query_temperature: float = 0.0
    """c: layers without rotary positions multiply queries by 1 + c·ln(1 + ⌊(position + 1) / temperature_floor⌋)"""
    temperature_floor: int = 8192
    """positions per step of that factor (Llama 4)"""
    attention_gate: bool = False
    """sigmoid gates, projected like queries, on the heads' outputs (Qwen3-Next)"""
    sinks: bool = False
    """one learned sink logit per head (GPT-OSS)"""
    qkv_bias: bool = False
    """bias on the query, key and value projections"""
    out_bias: bool = False
    """bias on the attention output projection"""
    mlp_bias: bool = False
    """biases in the dense MLP"""
    head_bias: bool = False
    """bias on the output projection"""
    window: int | None = None
    """keys that a sliding layer attends to, itself included; chunk size for chunked layers"""
    moe: MoE | None = None
    """experts of the moe layers"""
    mla: MLA | None = None
    """latent attention; overrides kv_heads and head_dim"""
    gated_delta: GatedDelta | None = None
    """heads of the gated_delta layers"""
    simplicial: Simplicial | None = None
    """windows of the simplicial layers"""

    def __post_init__(self) -> None:
        name = self.name
        if self.mla is not None:
            object.__setattr__(self, "kv_heads", self.heads)
            object.__setattr__(self, "head_dim", self.mla.nope_dim + self.mla.rope_dim)
        if not self.norm_eps > 0 or not self.rope.theta > 0:
            raise BadModel(f"{name}: norm_eps={self.norm_eps} and rope.theta={self.rope.theta} must be above 0")
        _check_rope(self)
        sizes = {key: getattr(self, key) for key in ("hidden", "heads", "kv_heads", "head_dim", "vocab", "context")}
        for key, value in sizes.items():
            if not isinstance(value, int) or not 0 < value <= _LARGEST:
                raise BadModel(f"{name}: {key}={value} must be an integer from 1 to {_LARGEST:,}")
        if not self.layers:
            raise BadModel(f"{name}: a model needs at least one layer; set num_layers")
        if self.heads % self.kv_heads:
            raise BadModel(
                f"{name}: {self.kv_heads} KV heads do not divide {self.heads} heads; set kv_heads to a divisor"
            )
        kinds = {kind.attention for kind in self.layers}
        if kinds & {"sliding", "chunked"} and not self.window:
            raise BadModel(f"{name}: sliding or chunked layers need a window; set window")
        if "2-simplicial" in kinds and self.simplicial is None:
            raise BadModel(f"{name}: simplicial layers need [model.simplicial] window_1 and window_2")
        if "gated_delta" in kinds:
            _check_gated_delta(self)
        if self.num_moe_layers and self.moe is None:
            raise BadModel(f"{name}: moe layers need [model.moe]")
        if self.temperature_floor < 1:
            raise BadModel(f"{name}: temperature_floor={self.temperature_floor} must be at least 1")
        if self.moe and self.moe.top_k > self.moe.num_experts:
            raise BadModel(f"{name}: top_k={self.moe.top_k} exceeds {self.moe.num_experts} experts; lower top_k")
        if self.num_moe_layers < self.num_layers and not 0 < self.ffn <= _LARGEST:
            raise BadModel(f"{name}: dense layers need ffn from 1 to {_LARGEST:,}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with a recurrent state in place of keys and values."""
        return sum(kind.attention == "gated_delta" for kind in self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(kind.mlp == "moe" for kind in self.layers)

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the layers for multi-token prediction: that of the last layer with attention."""
        return next((kind for kind in reversed(self.layers) if kind.attention != "gated_delta"), self.layers[-1])

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        dim = self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim
        return self.attention_scale if self.attention_scale is not None else dim**-0.5

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated (even)."""
        dim = self.mla.rope_dim if self.mla else int(self.head_dim * self.rope.fraction)
        return dim - dim % 2

    def with_layers(self, num_layers: int) -> ModelConfig:
        """The same model truncated or continued to another depth."""
        return replace(self, layers=tile(self.layers, num_layers))


def tile(layers: tuple[LayerKind, ...], num_layers: int) -> tuple[LayerKind, ...]:
    """Truncate `layers`, or continue its shortest repeating tail, to `num_layers`."""
    refuse_too_deep(num_layers)
    if num_layers <= len(layers):
        return layers[:num_layers]
    start, period = _repeat(layers)
    tail = [layers[start + (i - start) % period] for i in range(len(layers), num_layers)]
    return layers + tuple(tail)


def refuse_too_deep(num_layers: int) -> None:
    if not 1 <= num_layers <= _DEEPEST:
        raise BadModel(f"num_layers={num_layers} must be from 1 to {_DEEPEST:,}")


def _repeat(layers: tuple[LayerKind, ...]) -> tuple[int, int]:
    """(start, period) of the repeating tail with the smallest start + period."""
    for total in range(1, len(layers) + 1):
        for start in range(total):
            period = total - start
            if all(layers[i] == layers[i - period] for i in range(total, len(layers))):
                return start, period
    raise AssertionError("a tuple always repeats with its own length")


_DEEPEST = 10_000
_LARGEST = 2**40
"""above every size of a model; beyond it, arithmetic elsewhere overflows"""


def _check_gated_delta(config: ModelConfig) -> None:
    delta = config.gated_delta
    if delta is None:
        raise BadModel(f"{config.name}: gated_delta layers need [model.gated_delta] with heads and dims")
    sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.conv)
    if min(sizes) < 1 or delta.value_heads % delta.key_heads:
        raise BadModel(
            f"{config.name}: {delta.key_heads} key heads of gated_delta layers do not divide {delta.value_heads} value "
            "heads; set gated_delta.key_heads to a divisor, and every size to at least 1"
        )


def _check_rope(config: ModelConfig) -> None:
    rope, name = config.rope, config.name
    if rope.scaling in ("llama3", "yarn", "longrope") and not rope.original_context:
        raise BadModel(f"{name}: rope.scaling={rope.scaling} needs the context it extends; set rope.original_context")
    if not rope.factor > 0 or not 0 < rope.fraction <= 1:
        raise BadModel(f"{name}: rope.factor={rope.factor} must be above 0 and rope.fraction={rope.fraction} up to 1")
    if rope.scaling == "longrope":
        lengths = {len(rope.short_factors), len(rope.long_factors)}
        if lengths != {config.rotary_dim // 2}:
            raise BadModel(f"{name}: longrope needs {config.rotary_dim // 2} short and as many long factors; set both")
