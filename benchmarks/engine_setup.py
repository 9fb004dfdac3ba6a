"""Models with random weights, engines over them, and the read bandwidth of the device: for benchmarks of the engine."""

from __future__ import annotations

import time

import torch

from armillary.engine.build import make_engine
from armillary.engine.engine import Engine
from armillary.model.transformer import Transformer, build
from armillary.spec.catalogue import models
from armillary.spec.tables.serve import Serve


def drawn(name: str, device: str, dtype: torch.dtype, layers: int | None = None) -> Transformer:
    """The shape with random weights, drawn on the device."""
    config = models()[name].config
    model = build(config if layers is None else config.with_layers(layers), dtype=dtype, device=device)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(0.0, 0.02)
    return model.eval()


def read_bandwidth(device: str) -> float:
    """Bytes a second of a sum over a buffer far larger than the caches, the best of several."""
    count = 1 << (30 if device == "cuda" else 24)
    data, best = torch.ones(count, dtype=torch.float32, device=device), 0.0
    for _ in range(5):
        wait(device)
        begin = time.monotonic()
        for _ in range(4):
            data.sum()
        wait(device)
        best = max(best, 16.0 * count / (time.monotonic() - begin))
    return best


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def started(model: Transformer, serve: Serve) -> tuple[Engine, dict[str, float]]:
    """An engine, and what its start took."""
    phases: dict[str, float] = {}
    engine, _ = make_engine(model, None, serve, seed=0, phase=lambda name, seconds: phases.update({name: seconds}))
    return engine, {name: round(seconds, 2) for name, seconds in phases.items()}
