"""KV cache capacity: how many tokens and sequences a number of bytes holds, with the sums behind it.

block      layers of a group · block_tokens · values per token and layer · bytes per value
values     2·kv_heads/tp·head_dim; latent attention kv_rank + rope_dim; 2-simplicial layers twice as many
blocks     ⌊budget / block⌋ − 1: the null block is never used
sequence   Σ over groups of ⌈tokens / block_tokens⌉ blocks, windowed groups no more than window and step need
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import ceil

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.kv_offload import KVOffload
from armillary.engine.cache.layer_groups import Group, layer_groups, stage_layers
from armillary.errors import BadInput
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.arithmetic.params import state_bytes
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.units import bytes_text, parse_count


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """The KV cache of one device, before it is allocated."""

    config: ModelConfig
    budget_bytes: int
    dtype: str
    model_dtype: str
    tp: int
    pp: int = 1
    dp: int = 1
    """caches of this size, each of other requests"""
    block_tokens: int
    step_tokens: int
    """most tokens of a step: windowed layers hold them beside their window"""
    groups: tuple[Group, ...]
    host_bytes: int = 0
    """host memory for blocks that the device evicts"""

    @property
    def host_blocks(self) -> int:
        return self.host_bytes // self.block_bytes

    @property
    def layers_per_group(self) -> int:
        """Layers that a block has space for: on every rank those of the stage that has most."""
        stages = stage_layers(self.config.num_layers, self.pp)
        return max(sum(layer in stage for layer in group.layers) for group in self.groups for stage in stages)

    @property
    def numbers(self) -> int:
        """Values per token in one layer, the widest."""
        config = self.config
        if config.mla is not None:
            return config.mla.kv_rank + config.mla.rope_dim
        twice = any(layer.attention == "2-simplicial" for layer in config.layers)
        return 2 * ceil(config.kv_heads / self.tp) * config.head_dim * (2 if twice else 1)

    @property
    def block_bytes(self) -> int:
        return ceil(self.layers_per_group * self.block_tokens * self.numbers * size_of(self.dtype))

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self.budget_bytes // self.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens that fit while no window is full."""
        return max(0, self.num_blocks - 1) // len(self.groups) * self.block_tokens

    def blocks_of(self, tokens: int) -> int:
        return sum(group.blocks_at(tokens, self.block_tokens, self.step_tokens) for group in self.groups)

    def sequences_of(self, tokens: int) -> int:
        """Sequences of that length that fit together."""
        return max(0, self.num_blocks - 1) // self.blocks_of(tokens)

    @property
    def padding_fraction(self) -> float:
        """Share of the blocks' bytes that no layer uses."""
        stored = self.layers_per_group * len(self.groups) * self.pp
        return 1 - sum(len(group.layers) for group in self.groups) / stored

    @property
    def state_bytes(self) -> int:
        """Recurrent states of one sequence, which are held beside the blocks for every row of the batch."""
        return ceil(state_bytes(self.config, int(size_of(self.model_dtype))) / self.tp)

    def text(self, lengths: Items[int] = ()) -> str:
        """The capacity in words, with the sums behind it."""
        per_layer = f"{self.numbers:,} values per token and layer in {self.dtype}"
        shown = [f"{self.sequences_of(length):,} sequences of {length:,}" for length in lengths]
        usable = f"{self.num_blocks - 1:,} blocks of {self.block_tokens} tokens ({bytes_text(self.block_bytes)} each)"
        lines = [
            f"KV cache {bytes_text(self.budget_bytes)} = {usable} = "
            + " = ".join([f"{self.tokens:,} tokens", *shown])
            + (f", on each of {self.dp} dp ranks: {self.dp * self.tokens:,} tokens" if self.dp > 1 else ""),
            f"  a block: {self.layers_per_group} layers × {self.block_tokens} tokens × {per_layer}",
        ]
        if len(self.groups) > 1 or self.groups[0].sees != "all":
            lines += [f"  table {i}: {group.text()}" for i, group in enumerate(self.groups)]
        if self.padding_fraction > 0:
            lines.append(f"  {self.padding_fraction:.1%} of it is padding, so that all tables share one pool")
        if self.host_blocks:
            tokens = self.host_blocks // len(self.groups) * self.block_tokens
            lines.append(f"  {bytes_text(self.host_bytes)} of host memory hold {tokens:,} tokens more, evicted here")
        if self.state_bytes:
            lines.append(
                f"  beside it {bytes_text(self.state_bytes)} of recurrent states per sequence, of "
                f"{self.config.num_recurrent_layers} layers; without a prefix cache, since blocks do not hold them"
            )
        return "\n".join(lines)

    def make(self, *, prefix: bool = True) -> KVCache:
        """Recurrent states are not kept per block, so a model with such layers has no prefix cache."""
        has_states = self.config.num_recurrent_layers > 0
        cache = KVCache(
            self.num_blocks,
            self.block_tokens,
            groups=self.groups,
            prefix=prefix and not has_states,
            has_states=has_states,
            step_tokens=self.step_tokens,
        )
        if self.host_blocks and cache.prefix:
            KVOffload(cache, self.host_blocks)
        return cache


def plan_kv(
    config: ModelConfig,
    serve: Serve,
    budget_bytes: int | str,
    *,
    dtype: str = "bf16",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
) -> KVPlan:
    """A cache of `budget_bytes` per device; BadInput where not one output token would fit."""
    kv_dtype = dtype if serve.kv_dtype == "auto" else serve.kv_dtype
    plan = KVPlan(
        config=config,
        budget_bytes=parse_count(budget_bytes),
        dtype=kv_dtype,
        model_dtype=dtype,
        tp=tp,
        pp=pp,
        dp=dp,
        block_tokens=serve.block_tokens,
        step_tokens=serve.max_tokens_per_step,
        groups=layer_groups(config),
        host_bytes=serve.kv_host_bytes,
    )
    least = (plan.blocks_of(2) + 1) * plan.block_bytes
    if plan.budget_bytes < least:
        raise BadInput(
            f"{bytes_text(plan.budget_bytes)} of KV cache hold no sequence of {config.name}, whose blocks "
            f"take {bytes_text(plan.block_bytes)}; give at least serve.kv_bytes={least}"
        )
    return plan
