"""The recipe's [predict] table: how a model file (.pt2, .pt, .onnx) is served, as `armillary serve model.pt2` does."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.spec.tables.checks import above_zero, at_least, refuse


@dataclass(frozen=True, kw_only=True)
class Predict:
    """How the predict server batches; the defaults suit one model on one machine."""

    max_batch: int = 32
    """rows run together at most; 1: no batching"""
    max_delay_s: float = 0.0
    """how long the first row of a batch waits for others while the model is idle; 0: not at all, and rows that come
    while it runs are taken together in any case"""
    preferred: tuple[int, ...] = ()
    """batch sizes that are run as soon as they are complete, and that a batch is cut to"""
    max_queue: int = 4096
    """rows that wait at most; more are refused with 429"""
    timeout_s: float = 30.0
    """a request that has no answer by then gets 504"""
    max_body_bytes: int = 16_000_000
    """larger requests are refused with 413"""
    threads: int | None = None
    """threads of the model; none: one for each core this process may use"""
    device: str = "cpu"
    """where the model runs: cpu, cuda, cuda:1 …"""
    compile: bool = False
    """compile .pt2 models with torch.compile when they are loaded"""
    reload_s: float = 1.0
    """how often a new version is looked for; 0: never"""
    grace_s: float = 30.0
    """time that requests under way have to finish when the server is stopped"""

    def __post_init__(self) -> None:
        at_least(self, "predict", 1, "max_batch", "max_queue", "max_body_bytes", "threads")
        at_least(self, "predict", 0, "max_delay_s", "reload_s", "grace_s")
        above_zero(self, "predict", "timeout_s")
        if not all(1 <= size <= self.max_batch for size in self.preferred):
            raise refuse(self, "predict", "preferred", f"from 1 to predict.max_batch={self.max_batch}", better="[]")
