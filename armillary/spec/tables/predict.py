"""The recipe's [predict] table: serving a model file (.pt2, .pt, .onnx), as `armillary serve model.pt2` does."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.spec.tables.checks import above_zero, at_least, refuse


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Batching of the predict server; the defaults suit one model on one machine."""

    max_batch: int = 32
    """most rows per batch; 1: no batching"""
    max_delay_s: float = 0.0
    """how long the first row of a batch waits for others while the model is idle; 0: not at all; rows that arrive while
    it runs are batched in any case"""
    preferred: tuple[int, ...] = ()
    """batch sizes that run as soon as they are complete, and to which a larger batch is reduced"""
    max_queue: int = 4096
    """most waiting rows; more are rejected with 429"""
    timeout_s: float = 30.0
    """time after which a request without a response gets 504"""
    max_body_bytes: int = 16_000_000
    """larger requests are rejected with 413"""
    threads: int | None = None
    """threads of the model; none: one per core that this process may use"""
    device: str = "cpu"
    """where the model runs: cpu, cuda, cuda:1 …"""
    compile: bool = False
    """compile .pt2 models with torch.compile when they are loaded"""
    reload_s: float = 1.0
    """seconds between checks for a new version; 0: never"""
    grace_s: float = 30.0
    """time that running requests have to finish when the server is stopped"""

    def __post_init__(self) -> None:
        at_least(self, "predict", 1, "max_batch", "max_queue", "max_body_bytes", "threads")
        at_least(self, "predict", 0, "max_delay_s", "reload_s", "grace_s")
        above_zero(self, "predict", "timeout_s")
        if not all(1 <= size <= self.max_batch for size in self.preferred):
            raise refuse(self, "predict", "preferred", f"from 1 to predict.max_batch={self.max_batch}", better="[]")
