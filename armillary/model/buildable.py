"""Which model shapes the torch module can build; does not import torch.

Counting and planning work for every shape; the module raises for the others.
"""

from armillary.errors import BadModel
from armillary.spec.model import ModelConfig


def unbuildable(config: ModelConfig) -> str | None:
    """Why the module cannot build `config`, or None."""
    kinds = {kind.attention for kind in config.layers}
    if config.mla is not None:
        return "multi-head latent attention"
    if "chunked" in kinds:
        return "chunked attention"
    if "simplicial" in kinds:
        return "2-simplicial attention"
    if config.tied and config.head_bias:
        return "a bias on a tied output projection"
    return None


def refuse_unbuildable(config: ModelConfig) -> None:
    reason = unbuildable(config)
    if reason:
        raise BadModel(
            f"{config.name}: {reason} cannot be built here; its figures are in: armillary models {config.name}"
        )
