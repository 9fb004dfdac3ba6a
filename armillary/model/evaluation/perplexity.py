"""Perplexity of a model on windows of text, the KL divergence of one model from another, and how sure both are.

Windows are what is resampled: tokens of one window are not independent, windows of a text nearly are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.errors import BadInput
from armillary.model.evaluation.text_windows import TextWindows
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Progress, Transformer

# W windows, T tokens, V vocabulary
_RESAMPLES = 2000
Logits = Callable[[Tensor], Tensor]
"""logits of one window: [T] -> [T, V]"""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval: the percentiles of a bootstrap over windows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model against a reference on the same windows."""

    perplexity: Interval
    reference: Interval
    ratio: Interval  # perplexity over the reference's, resampled together
    kl: Interval  # mean over tokens, in nats

    @property
    def is_worse(self) -> bool:
        """Beyond what the choice of windows explains."""
        return self.ratio.low > 1.0


def model_logits(model: Transformer) -> Logits:
    """The whole model on one window at a time."""
    device = next(model.parameters()).device

    def logits(tokens_T: Tensor) -> Tensor:
        positions_BT = torch.arange(len(tokens_T), device=device)[None]
        return model.head(model(tokens_T.to(device)[None], positions_BT, plain))[0].float()

    return logits


@torch.no_grad()
def perplexity(logits: Logits, windows: TextWindows, progress: Progress | None = None) -> Interval:
    losses = []
    for i, tokens_T in enumerate(windows.tokens_WT):
        losses.append(token_loss(logits(tokens_T), tokens_T, windows.first))
        if progress:
            progress(i + 1, len(windows))
    return perplexity_of(losses)


@torch.no_grad()
def compare(logits: Logits, reference: Logits, windows: TextWindows, progress: Progress | None = None) -> Comparison:
    """`logits` against those of the reference, window by window."""
    rows = []
    for i, tokens_T in enumerate(windows.tokens_WT):
        rows.append(window_figures(logits(tokens_T), reference(tokens_T), tokens_T, windows.first))
        if progress:
            progress(i + 1, len(windows))
    return comparison_of(rows)


def window_figures(logits_TV: Tensor, reference_TV: Tensor, tokens_T: Tensor, first: int) -> tuple[float, float, float]:
    """(loss, the reference's loss, KL divergence), means over the predicted tokens of a window, in nats."""
    if logits_TV.shape != reference_TV.shape:
        sizes = f"{logits_TV.shape[-1]:,} and {reference_TV.shape[-1]:,}"
        raise BadInput(f"the models have vocabularies of {sizes} tokens; compare models of one tokenizer")
    own, theirs = (each[first - 1 : -1].log_softmax(dim=-1) for each in (logits_TV, reference_TV.to(logits_TV.device)))
    kl = float((theirs.exp() * (theirs - own)).sum(-1).mean())
    targets_T = tokens_T[first:].to(own.device)
    return float(F.nll_loss(own, targets_T)), float(F.nll_loss(theirs, targets_T)), kl


def token_loss(logits_TV: Tensor, tokens_T: Tensor, first: int) -> float:
    """Mean cross-entropy of the predicted tokens of a window, in nats."""
    return float(F.cross_entropy(logits_TV[first - 1 : -1], tokens_T[first:].to(logits_TV.device)))


def perplexity_of(losses_W: list[float]) -> Interval:
    return _interval(np.asarray(losses_W), exp)


def comparison_of(rows: list[tuple[float, float, float]]) -> Comparison:
    """Of `window_figures` of every window."""
    own, theirs, kl = np.asarray(rows).T
    return Comparison(
        perplexity=_interval(own, exp),
        reference=_interval(theirs, exp),
        ratio=_interval(own - theirs, exp),
        kl=_interval(kl, float),
    )


def _interval(values_W: np.ndarray, shown: Callable[[float], float]) -> Interval:
    """`shown` of the mean; it must not decrease."""
    pick = np.random.default_rng(0).integers(0, len(values_W), (_RESAMPLES, len(values_W)))
    low, high = np.percentile(values_W[pick].mean(axis=1), [2.5, 97.5])
    return Interval(value=shown(float(values_W.mean())), low=shown(float(low)), high=shown(float(high)))
