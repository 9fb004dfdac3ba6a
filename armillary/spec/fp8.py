"""fp8 rule: which GEMMs of a model run in fp8 and which stay in bf16, for the trainer and as text.

fp8: the projections of attention and of dense MLPs, where their sizes are multiples of 16 on every rank. bf16: the
embedding, norms, attention itself, the head with its loss, routers and experts, projections to latents (DeepSeek), and
those with adapters.
"""

from collections.abc import Iterator
from typing import NamedTuple

from armillary.spec.layout import Layout
from armillary.spec.lora import targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

MULTIPLE = 16
"""sizes of an fp8 GEMM must be a multiple of this, for the tensor cores"""


class Projection(NamedTuple):
    """A linear layer of a block with its full size, not that of a shard; tp shards the outputs of a `column`
    projection, the inputs of others."""

    name: str
    outputs: int
    inputs: int
    column: bool


def projections(config: ModelConfig) -> Iterator[Projection]:
    """The projections that fp8 applies to; MLPs only where layers have dense ones."""
    mla, heads = config.mla, config.heads * config.head_dim
    if mla is not None:
        rows = config.heads * (mla.nope_dim + mla.rope_dim)
        yield Projection("attention.q", rows, mla.q_rank or config.hidden, True)
        yield Projection("attention.kv_up", config.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, True)
        yield Projection("attention.out", config.hidden, config.heads * mla.v_dim, False)
    else:
        if (delta := config.gated_delta) is not None and config.num_recurrent_layers:
            values = delta.value_heads * delta.value_dim
            rows = delta.channels + values + 2 * delta.value_heads
            yield Projection("attention.qkv", rows, config.hidden, True)
            yield Projection("attention.out", config.hidden, values, False)
        heads_and_gates = heads * (1 + config.attention_gate)
        yield Projection("attention.qkv", heads_and_gates + 2 * config.kv_heads * config.head_dim, config.hidden, True)
        yield Projection("attention.out", config.hidden, heads, False)
    if config.num_moe_layers < config.num_layers:
        yield Projection("mlp.up", config.ffn * (2 if config.gated else 1), config.hidden, True)
        yield Projection("mlp.down", config.hidden, config.ffn, False)


def stays_in_bf16(config: ModelConfig, layout: Layout, job: TrainJob | None = None) -> dict[str, str]:
    """Projection -> why it stays in bf16; the others run in fp8."""
    modules = targets(config, job.lora_on) if job is not None and job.lora_rank else {}
    adapted = {module.split(".", 2)[2] for module in modules}
    reasons: dict[str, str] = {}
    for name, outputs, inputs, column in projections(config):
        sizes = (outputs // layout.tp, inputs) if column else (outputs, inputs // layout.tp)
        if name in adapted:
            reasons[name] = "adapters"
        elif any(size % MULTIPLE for size in sizes):
            reasons[name] = f"{sizes[0]} × {sizes[1]} is not in multiples of {MULTIPLE}"
    return reasons


def fp8_rule(config: ModelConfig, layout: Layout, job: TrainJob | None = None) -> str:
    """The rule for this model, in one line."""
    reasons = stays_in_bf16(config, layout, job)
    narrow = [name for name in dict.fromkeys(p.name for p in projections(config)) if name not in reasons]
    wide = [f"{name} ({why})" for name, why in reasons.items()]
    wide += ["routers and experts"] if config.num_moe_layers else []
    wide += ["projections to latents"] if config.mla is not None else []
    wide += ["embedding, norms, attention, head and loss"]
    return (
        f"fp8 (E4M3, gradients E5M2, per-{layout.fp8_scaling} scales): {', '.join(narrow) or 'nothing'}; "
        f"bf16: {', '.join(wide)}"
    )
