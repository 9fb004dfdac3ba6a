"""Which model shapes the torch module can build; does not import torch.

Counting and planning work for every shape; the module raises for the others.
"""

from armillary.errors import BadModel
from armillary.spec.model import ModelConfig


def unbuildable(config: ModelConfig) -> str | None:
    """Why the module cannot build `config`, or None."""
    kinds = {kind.attention for kind in config.layers}
    rotates = config.positions == "rope" and all(kind.rope for kind in config.layers)
    reasons = {
        "latent attention with windows": config.mla is not None and kinds != {"full"},
        "latent attention without rotary positions": config.mla is not None and not rotates,
        "2-simplicial attention with more than a scaled softmax": "2-simplicial" in kinds and _is_more(config),
        "a bias on a tied output projection": config.tied and config.head_bias,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_more(config: ModelConfig) -> bool:
    """Latents, gates, sinks, caps, clamps, ALiBi or a norm over all heads: what the layer of pairs does not have."""
    parts = (config.mla, config.attention_gate, config.sinks, config.attention_softcap, config.qkv_clip)
    return any(parts) or config.positions == "alibi" or config.qk_norm == "all"


def refuse_unbuildable(config: ModelConfig) -> None:
    reason = unbuildable(config)
    if reason:
        raise BadModel(
            f"{config.name}: {reason} cannot be built here; its figures are in: armillary models {config.name}"
        )
