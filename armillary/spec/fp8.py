"""Which matrix products of a model run in fp8 and which stay in bf16: one rule for the trainer, and its words.

fp8: the projections of attention and of dense MLPs, where their sizes are multiples of 16 on every rank. bf16: what is
looked up or normed, attention itself, the head and its loss, routers and experts, and projections with adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from armillary.spec.layout import Layout
from armillary.spec.lora import targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob

MULTIPLE = 16
"""of the sizes of an fp8 product, for the tensor cores"""


class Projection(NamedTuple):
    """A linear layer of a block."""

    name: str
    """'attention.qkv' …"""
    outputs: int
    """of the whole, not of a rank's part"""
    inputs: int
    cuts_outputs: bool
    """tp cuts the outputs, else the inputs"""


def projections(config: ModelConfig) -> Iterator[Projection]:
    """Those that fp8 is for; MLPs only where layers have dense ones."""
    heads = config.heads * config.head_dim
    yield Projection("attention.qkv", heads + 2 * config.kv_heads * config.head_dim, config.hidden, True)
    yield Projection("attention.out", config.hidden, heads, False)
    if config.num_moe_layers < config.num_layers:
        yield Projection("mlp.up", config.ffn * (2 if config.gated else 1), config.hidden, True)
        yield Projection("mlp.down", config.hidden, config.ffn, False)


def kept_in_bf16(config: ModelConfig, layout: Layout, job: TrainJob | None = None) -> dict[str, str]:
    """Projection -> why it stays in bf16; the others run in fp8."""
    adapted = _adapted(config, job) if job is not None and job.lora_rank else set()
    found: dict[str, str] = {}
    for name, outputs, inputs, cuts_outputs in projections(config):
        sizes = (outputs // layout.tp, inputs) if cuts_outputs else (outputs, inputs // layout.tp)
        if name in adapted:
            found[name] = "adapters"
        elif any(size % MULTIPLE for size in sizes):
            found[name] = f"{sizes[0]} × {sizes[1]} is not in multiples of {MULTIPLE}"
    return found


def _adapted(config: ModelConfig, job: TrainJob) -> set[str]:
    """Projections with adapters, by their name within a block."""
    return {module.split(".", 2)[2] for module in targets(config, job.lora_on)}


def fp8_rule(config: ModelConfig, layout: Layout, job: TrainJob | None = None) -> str:
    """The rule as it falls out for this model, in one line."""
    kept = kept_in_bf16(config, layout, job)
    narrow = [p.name for p in projections(config) if p.name not in kept]
    wide = [f"{name} ({why})" for name, why in kept.items()]
    wide += ["routers and experts"] if config.num_moe_layers else []
    wide += ["embedding, norms, attention, head and loss"]
    scale = f"one a {layout.fp8_scaling}"
    return f"fp8 (E4M3, gradients E5M2, scales {scale}): {', '.join(narrow) or 'nothing'}; bf16: {', '.join(wide)}"
