"""Operations of one forward pass on one device of a replica, after tensor, pipeline and expert parallelism.

tp ranks shard heads and MLPs of the same tokens; ep ranks have their own sequences and shard the experts (attention is
data-parallel); pp stages shard the layers. A step is a few groups of equal sequences, so that its price does not
depend on their number.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from armillary.errors import BadLayout
from armillary.spec.arithmetic.ops import Op, grouped_matmul
from armillary.spec.arithmetic.sublayers import Batch, experts_used
from armillary.spec.arithmetic.workload import embedding_operations, head_operations, layer_operations
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import tp_holds, tp_says
from armillary.spec.model import GatedDelta, LayerKind, ModelConfig

EXPERT_GEMMS = ("moe.gate_up", "moe.down")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Parallelism of one replica: tp · pp · ep devices."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise BadLayout(f"layout.{name}={getattr(self, name)} must be at least 1; try --set layout.{name}=1")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.ep

    def text(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "ep")}
        return " × ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"


@dataclass(frozen=True, kw_only=True)
class ServingDtypes:
    """Dtypes of a served model: of stored weights, of the inputs of GEMMs, and of the KV cache."""

    weights: str = "bf16"
    """of the matrices of layers; embedding and head are in the activations' dtype"""
    compute: str = "bf16"
    kv: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class Group:
    """`count` sequences that each add `queries` tokens and then attend to `keys`, the new ones included."""

    count: int
    queries: int
    keys: int

    @property
    def tokens(self) -> int:
        return self.count * self.queries


@dataclass(frozen=True, kw_only=True)
class RepeatedBatch(Batch):
    """`copies` of the same spans: the operations of all copies at the cost of listing one."""

    copies: int

    @property
    def tokens(self) -> int:
        return self.copies * sum(queries for queries, _ in self.spans)


def check_split(config: ModelConfig, split: Split) -> None:
    """Refuse what no engine runs: heads or MLPs that tp does not divide, more stages than layers, more ranks than
    experts."""
    layout, case = Layout(tp=split.tp), Case(model=config, for_training=False)
    if not tp_holds(layout, case):
        raise BadLayout(tp_says(layout, case))
    if split.pp > config.num_layers:
        raise BadLayout(
            f"pp={split.pp} exceeds the {config.num_layers} layers of {config.name}; "
            f"try --set layout.pp={config.num_layers}"
        )
    if split.ep > 1 and (config.moe is None or split.ep > config.moe.num_experts):
        experts = config.moe.num_experts if config.moe else 0
        raise BadLayout(
            f"ep={split.ep} needs at least as many experts and {config.name} has {experts}; "
            f"try --set layout.ep={max(1, experts)}"
        )


def sharded(config: ModelConfig, tp: int) -> ModelConfig:
    """The model of one of `tp` ranks: heads, MLPs and vocabulary sharded (rounded up, as engines pad), KV heads
    replicated where there are fewer than ranks (Megatron-LM, arXiv 1909.08053)."""
    if tp == 1:
        return config
    heads, kv_heads = ceil(config.heads / tp), ceil(config.kv_heads / tp)
    moe = config.moe
    if moe is not None:
        moe = replace(moe, ffn=ceil(moe.ffn / tp), shared_ffn=ceil(moe.shared_ffn / tp))
    return replace(
        config,
        heads=ceil(heads / kv_heads) * kv_heads,
        kv_heads=kv_heads,
        ffn=ceil(config.ffn / tp),
        vocab=ceil(config.vocab / tp),
        moe=moe,
        gated_delta=None if config.gated_delta is None else _sharded_delta(config.gated_delta, tp),
    )


def _sharded_delta(delta: GatedDelta, tp: int) -> GatedDelta:
    heads = ceil(delta.key_heads / tp)
    return replace(delta, key_heads=heads, value_heads=heads * (delta.value_heads // delta.key_heads))


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A model sharded for one device, in given dtypes."""

    config: ModelConfig
    split: Split
    dtypes: ServingDtypes
    same_tokens: bool = False
    """every token is the same one"""

    @cached_property
    def cache(self) -> dict[tuple[object, ...], tuple[tuple[Op, int], ...]]:
        """Operation lists by key: building one takes longer than pricing it."""
        return {}

    @property
    def dtype(self) -> str:
        """Of activations, embedding and head: fp32 or fp16 where the GEMMs are, else bf16."""
        return self.dtypes.compute if self.dtypes.compute in ("fp32", "fp16") else "bf16"

    @cached_property
    def local_config(self) -> ModelConfig:
        return sharded(self.config, self.split.tp)

    @cached_property
    def kinds(self) -> dict[LayerKind, int]:
        return dict(Counter(self.config.layers))

    def ops(self, tokens: int, logits: int, *, decoding: bool) -> tuple[tuple[Op, int], ...]:
        """(operation, count) of a pass over `tokens` of one ep rank, all stages one after the other, without attention
        itself; `logits` rows reach the head."""
        key = ("ops", tokens, logits, decoding)
        if key not in self.cache:
            self.cache[key] = self._ops(tokens, logits, decoding)
        return self.cache[key]

    def attention(self, group: Group) -> tuple[tuple[Op, int], ...]:
        """(attention of one sequence of the group, count: layers × sequences)."""
        key = ("attention", group.queries, group.keys)
        if key not in self.cache:
            self.cache[key] = self._attention(group.queries, group.keys)
        return tuple((op, count * group.count) for op, count in self.cache[key])

    def _ops(self, tokens: int, logits: int, decoding: bool) -> tuple[tuple[Op, int], ...]:
        span = (1, 2) if decoding else (1, 1)
        batch = RepeatedBatch(
            spans=(span,),
            copies=tokens,
            logits=logits,
            dtype=self.dtype,
            weight_dtype=self.dtypes.weights,
            kv_dtype=self.dtypes.kv,
            same_tokens=self.same_tokens,
        )
        ops = [(piece.forward, 1) for piece in embedding_operations(self.local_config, batch)]
        for kind, count in self.kinds.items():
            pieces = layer_operations(self.local_config, kind, batch)
            ops += [
                (self._expert(piece.forward, tokens), count) for piece in pieces if piece.forward.kind != "attention"
            ]
        head = replace(batch, weight_dtype="", copies=1)
        return (*ops, *((piece.forward, 1) for piece in head_operations(self.local_config, head, loss=False)))

    def _attention(self, queries: int, keys: int) -> tuple[tuple[Op, int], ...]:
        batch = RepeatedBatch(spans=((queries, keys),), copies=1, logits=1, dtype=self.dtype, kv_dtype=self.dtypes.kv)
        return tuple(
            (piece.forward, count)
            for kind, count in self.kinds.items()
            for piece in layer_operations(self.local_config, kind, batch)
            if piece.forward.kind == "attention"
        )

    def _expert(self, op: Op, tokens: int) -> Op:
        """A grouped GEMM with ep: the rows of this rank's tokens, the weights of the experts on this rank."""
        if self.split.ep == 1 or op.name not in EXPERT_GEMMS or self.config.moe is None:
            return op
        moe, (_, _, n, k) = self.config.moe, op.shape
        groups = ceil(experts_used(moe, tokens * self.split.ep) / self.split.ep)
        return grouped_matmul(
            op.name, tokens * moe.top_k, n, k, groups=groups, dtype=op.dtype, weight_dtype=self.dtypes.weights
        )
