"""Small cases the planning tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster
from armillary.spec.model import LayerKind, ModelConfig


def small_model(**changes: Any) -> ModelConfig:
    """A model whose sizes divide by 8."""
    layers = changes.pop("num_layers", 8)
    base = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 4096, "vocab": 32_000, "context": 8192}
    return ModelConfig(layers=(LayerKind(),) * layers, **(base | changes))


def case_of(model: str | ModelConfig, on: str, *, sequence: int = 4096, sequences: int = 64, **more: Any) -> TrainCase:
    config = catalogue.model(model).config if isinstance(model, str) else model
    return TrainCase(
        model=config, cluster=catalogue.cluster(on), sequence=sequence, batch_tokens=sequence * sequences, **more
    )


def quicker(cluster: Cluster, *, links: float = 1.0, memory: float = 1.0, flops: float = 1.0) -> Cluster:
    """The same cluster with every rate of a kind multiplied."""
    chip = replace(
        cluster.chip,
        memory_bytes_per_s=(cluster.chip.memory_bytes_per_s or 0) * memory,
        flops={dtype: rate * flops for dtype, rate in cluster.chip.flops.items()},
    )
    wires = [replace(tier.link, bytes_per_s=(tier.link.bytes_per_s or 0) * links) for tier in cluster.tiers]
    tiers = tuple(replace(tier, link=wire) for tier, wire in zip(cluster.tiers, wires, strict=True))
    return replace(cluster, chip=chip, tiers=tiers)
