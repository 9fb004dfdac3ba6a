"""LoRA: which projections have adapters, and how many parameters those have.

An adapter adds scale·B·A to a frozen matrix, A [rank, inputs] and B [outputs, rank] (Hu et al., arXiv 2106.09685). Each
projection that a Hugging Face folder names has its own adapter, also where ours are fused into one matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from armillary.errors import BadRecipe, nearest
from armillary.spec.model import MLA, LayerKind, ModelConfig

GROUPS = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}
"""our matrices and the projections fused in them"""
LATENT = {"q": ("q_a", "q_b"), "qkv": ("q_a", "q_b", "kv_a", "kv_b")}
"""groups of latent attention: projections to latents (`_a`) and from them (`_b`), as DeepSeek's folders name them"""
NAMES = (*GROUPS, "q", "k", "v", *LATENT["qkv"], "gate", "up")
"""values of train.lora_on"""
STACKED = ("phi3",)
"""families whose folders store QKV, and gate and up, as one matrix: one A for all of its rows"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One matrix with adapters. Its rows repeat in periods (a KV head's queries, key and value; a gate and its up), so
    a contiguous shard of the rows is a Target with fewer periods. A period has `widths` rows of each of its `parts`,
    and `chosen` says which of these have adapters."""

    inputs: int
    periods: int
    parts: tuple[str, ...]
    widths: tuple[int, ...]
    chosen: tuple[bool, ...]
    one_a: bool
    """one A for all, since they are one matrix in a Hugging Face folder"""
    column: bool
    """tensor parallelism shards outputs (QKV, gate and up) rather than inputs (out, down)"""
    replicated: bool = False
    """tensor parallelism shards neither (projections to latents)"""

    @property
    def num_a(self) -> int:
        """Number of matrices A."""
        return 1 if self.one_a else sum(self.chosen)

    @property
    def adapted(self) -> int:
        """Rows per period that have a row of B."""
        return sum(width for width, on in zip(self.widths, self.chosen, strict=True) if on)

    def weights(self, rank: int) -> int:
        """Parameters of A and B together."""
        return rank * (self.num_a * self.inputs + self.periods * self.adapted)

    def unsharded_weights(self, rank: int) -> int:
        """Those that every rank of tensor parallelism has: A where outputs are sharded, B where inputs are."""
        if self.replicated:
            return self.weights(rank)
        return rank * (self.num_a * self.inputs if self.column else self.periods * self.adapted)


def check_names(on: Sequence[str]) -> None:
    """Refuse unknown projections, before any model is known."""
    for name in on:
        if name not in NAMES:
            guess = nearest(name, NAMES) or "qkv"
            raise BadRecipe(
                f"train.lora_on has no projection '{name}' ({', '.join(NAMES)}); try --set train.lora_on={guess}"
            )
    if not on:
        raise BadRecipe("train.lora_on is empty, so nothing would be trained; try --set train.lora_on=qkv,out")


def targets(config: ModelConfig, on: Sequence[str]) -> dict[str, Target]:
    """Module name in our model -> its adapters, in the order of the layers. Routed experts have none."""
    check_names(on)
    names = _parts(config, on)
    by_module = {
        f"blocks.{i}.{module}": target
        for i, kind in enumerate(config.layers)
        for module, target in _layer(config, kind, names).items()
        if any(target.chosen)
    }
    if not by_module:
        raise BadRecipe(
            f"{config.name} has only experts where {', '.join(sorted(names))} would be, and those carry no "
            "adapters; try --set train.lora_on=qkv,out"
        )
    return by_module


def _parts(config: ModelConfig, on: Sequence[str]) -> set[str]:
    """The projections of `on`; BadRecipe for those that the model does not have."""
    if "gate" in on and not config.gated:
        raise BadRecipe(f"the MLP of {config.name} has no gate; try --set train.lora_on=up,down")
    if config.mla is None:
        if missing := [name for name in on if name in LATENT["qkv"]]:
            raise BadRecipe(f"{config.name} has no latents, so no {missing[0]}; try --set train.lora_on=qkv,out")
        return {part for name in on for part in GROUPS.get(name, (name,))}
    if missing := [name for name in on if name in ("k", "v")]:
        raise BadRecipe(
            f"keys and values of {config.name} are projected together, so there is no {missing[0]}; "
            "try --set train.lora_on=q,kv_a,kv_b"
        )
    if "q_a" in on and config.mla.q_rank is None:
        raise BadRecipe(f"{config.name} has no latents of queries, so no q_a; try --set train.lora_on=q_b,kv_a,kv_b")
    return {part for name in on for part in LATENT.get(name) or GROUPS.get(name, (name,))}


def _layer(config: ModelConfig, kind: LayerKind, names: set[str]) -> dict[str, Target]:
    return _attention(config, kind, names) | (_mlp(config, names) if kind.mlp == "dense" else {})


def _attention(config: ModelConfig, kind: LayerKind, names: set[str]) -> dict[str, Target]:
    if names.isdisjoint({"q", "k", "v", "out", *LATENT["qkv"]}):
        return {}
    if kind.attention == "gated_delta" or config.attention_gate:
        raise BadRecipe(f"the gated layers of {config.name} take no adapters yet; try --set train.lora_rank=0")
    if config.mla is not None and kind.attention != "2-simplicial":
        return _latent_attention(config, config.mla, names)
    if kind.attention == "2-simplicial":
        raise BadRecipe(f"the attention of {config.name} takes no adapters yet; try --set train.lora_on=gate_up,down")
    dim, group = config.head_dim, config.heads // config.kv_heads
    qkv = _target(config, "qkv", names, inputs=config.hidden, periods=config.kv_heads, widths=(group * dim, dim, dim))
    out = _target(config, "out", names, inputs=config.heads * dim, periods=config.hidden, widths=(1,))
    return {"attention.qkv": qkv, "attention.out": out}


def _latent_attention(config: ModelConfig, mla: MLA, names: set[str]) -> dict[str, Target]:
    """Without latents of queries, `q_b` is the one projection of queries (q_proj)."""
    query_rows = config.heads * (mla.nope_dim + mla.rope_dim)
    up_rows, out_inputs = config.heads * (mla.nope_dim + mla.v_dim), config.heads * mla.v_dim
    shapes = {  # module: (projection, inputs, outputs)
        "attention.q_down": ("q_a", config.hidden, mla.q_rank or 0),
        "attention.q": ("q_b", mla.q_rank or config.hidden, query_rows),
        "attention.kv_down": ("kv_a", config.hidden, mla.kv_rank + mla.rope_dim),
        "attention.kv_up": ("kv_b", mla.kv_rank, up_rows),
        "attention.out": ("out", out_inputs, config.hidden),
    }
    return {
        module: replace(
            _target(config, part, names, inputs=inputs, periods=outputs, widths=(1,)),
            replicated=part in ("q_a", "kv_a"),
        )
        for module, (part, inputs, outputs) in shapes.items()
        if outputs
    }


def _mlp(config: ModelConfig, names: set[str]) -> dict[str, Target]:
    group, widths = ("gate_up", (1, 1)) if config.gated else ("up", (1,))
    up = _target(config, group, names, inputs=config.hidden, periods=config.ffn, widths=widths)
    down = _target(config, "down", names, inputs=config.ffn, periods=config.hidden, widths=(1,))
    return {"mlp.up": up, "mlp.down": down}


def _target(
    config: ModelConfig, group: str, names: set[str], *, inputs: int, periods: int, widths: tuple[int, ...]
) -> Target:
    parts = GROUPS.get(group, (group,))
    return Target(
        inputs=inputs,
        periods=periods,
        parts=parts,
        widths=widths,
        chosen=tuple(part in names for part in parts),
        one_a=config.family in STACKED or len(parts) == 1,
        column=group not in ("out", "down"),
    )


def adapter_weights(config: ModelConfig, *, rank: int, on: Sequence[str]) -> int:
    """Weights of all adapters: what is trained."""
    return sum(target.weights(rank) for target in targets(config, on).values())


def frozen_experts(config: ModelConfig, on: Sequence[str]) -> int:
    """Layers whose MLP was asked for but stays frozen, being experts."""
    names = {part for name in on for part in GROUPS.get(name, (name,))}
    return 0 if names.isdisjoint({"gate", "up", "down"}) else config.num_moe_layers
