"""LoRA: which projections have adapters, and how many parameters those have.

An adapter adds scale·B·A to a frozen matrix, A [rank, inputs] and B [outputs, rank] (Hu et al., arXiv 2106.09685). Each
projection that a Hugging Face folder names has its own adapter, also where ours are fused into one matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.errors import BadRecipe, nearest
from armillary.spec.model import LayerKind, ModelConfig

GROUPS = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}
"""our matrices and the projections fused in them"""
NAMES = (*GROUPS, "q", "k", "v", "gate", "up")
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
    names = {part for name in on for part in GROUPS.get(name, (name,))}
    if "gate" in on and not config.gated:
        raise BadRecipe(f"the MLP of {config.name} has no gate; try --set train.lora_on=up,down")
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


def _layer(config: ModelConfig, kind: LayerKind, names: set[str]) -> dict[str, Target]:
    return _attention(config, kind, names) | (_mlp(config, names) if kind.mlp == "dense" else {})


def _attention(config: ModelConfig, kind: LayerKind, names: set[str]) -> dict[str, Target]:
    if names.isdisjoint({"q", "k", "v", "out"}):
        return {}
    if config.mla is not None or kind.attention == "simplicial":
        raise BadRecipe(f"the attention of {config.name} takes no adapters yet; try --set train.lora_on=gate_up,down")
    dim, group = config.head_dim, config.heads // config.kv_heads
    qkv = _target(config, "qkv", names, inputs=config.hidden, periods=config.kv_heads, widths=(group * dim, dim, dim))
    out = _target(config, "out", names, inputs=config.heads * dim, periods=config.hidden, widths=(1,))
    return {"attention.qkv": qkv, "attention.out": out}


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
