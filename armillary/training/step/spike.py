"""The guard against loss spikes: a batch whose loss is far above the last ones is reported, skipped or rewound.

The limit is the median of the last losses plus SIGMAS standard deviations. These are estimated from the median
difference of neighbours, so that neither a spike nor the fall of the loss raises it. The device itself skips the update
of a batch beyond it, as for values that are not finite (nonfinite.py), so nothing waits. `train.on_spike` says what
follows.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armillary.errors import ArmillaryError, BadRecipe
from armillary.kernels.optimizer.adamw import AdamW
from armillary.parallel.consensus import Consensus
from armillary.spec.tables.train import TrainJob

WINDOW, RECENT, FEWEST = 128, 16, 20
"""last losses whose noise is known, those that a new one is compared with, and how many there must be"""
SIGMAS = 6.0
"""as OLMo 2 skips steps (OLMo-core's SkipStepAdamW, 2025)"""
LEAST_SHARE = 0.15
"""a spike is at least this share of the median above it: late in a run losses differ by little"""
NORM_FACTOR = 10.0
"""times the median gradient norm, from which a norm is reported"""
MOST_IN_A_ROW = 20
"""spikes one after the other, beyond which no batch is to blame"""
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class SpikeGuard:
    """`guarded(loss)` before the update, `check(step, values)` after the step; every rank reads the same values."""

    def __init__(self, job: TrainJob, ranks: Consensus, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
        """`scaled`: by fp16's loss scaler, which decides by itself what is skipped."""
        if scaled and job.on_spike != "warn":
            raise BadRecipe(
                f"train.on_spike={job.on_spike} needs another precision than fp16; try --set train.on_spike=warn"
            )
        self._job, self._ranks, self._optimizer = job, ranks, optimizer
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self.skipped = 0
        self.rewinds = False
        """whether the run must go back to its newest checkpoint"""
        self.said: Callable[[str], None] = lambda text: None
        self.samples: Callable[[int, str], str] = lambda step, why: ""
        """writes down the samples of a step's batch and says what they are from"""

    @property
    def limit(self) -> float:
        """The largest loss that is no spike; infinite where too little is known."""
        if len(self._losses) < FEWEST:
            return math.inf
        middle = self._usual
        spread = _MAD / math.sqrt(2) * median(abs(after - before) for before, after in pairwise(self._losses))
        # a number that the device's fp32 has, too, so that host and device decide alike
        return float(np.float32(middle + max(SIGMAS * spread, LEAST_SHARE * abs(middle))))

    @property
    def _usual(self) -> float:
        return median(list(self._losses)[-RECENT:])

    def guarded(self, loss: Tensor) -> Tensor:
        """The loss, or infinity where it is a spike whose update must not happen; decided on the device."""
        limit = self.limit
        if self._job.on_spike == "warn" or not math.isfinite(limit):
            return loss
        return torch.where(loss > limit, torch.inf, loss)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Report a spike, and count or raise it; the same on all ranks, as all have read the same values."""
        self.rewinds = False
        loss, norm, limit = values["loss"], values["grad_norm"], self.limit
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        if loss <= limit:
            self._in_a_row = 0
            self._check_norm(step, norm)
            self._losses.append(loss)
            self._norms.append(norm)
            return
        self._spike(step, loss, limit)

    def _spike(self, step: int, loss: float, limit: float) -> None:
        why = f"loss {loss:.4g} at step {step} is a spike (the last ones: {self._usual:.4g}, limit {limit:.4g})"
        where = self.samples(step, why)
        self._in_a_row += 1
        action = self._job.on_spike
        if action == "warn":
            self._losses.append(loss)  # the data may have changed for good
            return self.said(f"{why}{where}; skip such batches with --set train.on_spike=skip")
        if isinstance(self._optimizer, AdamW):
            self._optimizer.uncount()
        if action == "stop" or self._in_a_row >= MOST_IN_A_ROW:
            after = f"the step was not taken: look at the samples, or try {_next(self._job)}"
            self._ranks.raise_first(ArmillaryError(f"{why}{where}; {after}"))
        self.skipped += 1
        self.rewinds = action == "rewind"
        self.said(f"{why}{where}; the batch was skipped{' and the run goes back' if self.rewinds else ''}")

    def _check_norm(self, step: int, norm: float) -> None:
        usual = median(self._norms) if len(self._norms) >= FEWEST else math.inf
        if norm > NORM_FACTOR * usual:
            self.said(f"gradient norm {norm:.3g} at step {step} is {norm / usual:.0f} times the usual; it is clipped")

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._losses.clear()
        self._norms.clear()
        self._losses.extend(state.get("losses", ()))
        self._norms.extend(state.get("norms", ()))


def _next(job: TrainJob) -> str:
    """What to try where a run ends because of spikes; where it skips batches already, there were too many."""
    lower = f"--set train.lr={job.lr / 2:g}" if job.lr else "a lower train.lr"
    return "--set train.on_spike=skip" if job.on_spike == "stop" else lower
