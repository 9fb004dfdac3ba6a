"""Data-parallel attention of the engine: every dp rank runs the steps of its own requests, rank 0 decides all of them.

Rank 0 encodes a step for each dp rank and sends it to the ranks of that one; the first of these sends back what the
step gave: tokens, log-probabilities, vectors. All steps of a decision run at once, since their experts need each
other's tokens.
"""

from dataclasses import dataclass, replace

import torch

from armillary.engine.runner.executor import FastExecutor, Launched
from armillary.engine.runner.rank_layout import RankLayout
from armillary.engine.runner.ranks.step_reports import launched_elsewhere
from armillary.engine.runner.ranks.token_gather import GatheredExperts, GatheredTokens
from armillary.engine.runner.step_bytes import RankMessage
from armillary.engine.runner.step_input import Step
from armillary.engine.runner.tensor_parallel import Leader, OwnExperts, divide_experts
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.dp_scheduler import DpDecision
from armillary.parallel.shared_sum import SharedSum, sum_over


def gather_tokens(executor: FastExecutor, ranks: RankLayout) -> None:
    """Let the experts of every layer get the tokens of all dp ranks; with tp, after `tensor_parallel.shard`."""
    assert ranks.dp is not None
    forward = executor.forward
    add = sum_over(ranks.world, executor.device)
    add_dp = add if ranks.tp.size == 1 else sum_over(ranks.dp, executor.device)
    tokens = GatheredTokens(ranks.dp, add, add_dp if isinstance(add_dp, SharedSum) else None)
    mixtures = [layer.mixture for layer in forward.layers if layer.mixture is not None]
    for mixture, counts_E in zip(mixtures, forward.expert_counts_LE.unbind(), strict=True):
        if ranks.tp.size == 1:
            divide_experts(mixture, ranks.experts, forward.kernels)
        drops = isinstance(mixture.dispatch, OwnExperts)
        mixture.dispatch = GatheredExperts(mixture.dispatch, tokens, counts_E, drops=drops)
    # these choose experts themselves, and have them all
    forward.kernels = replace(forward.kernels, moe=None, grouped_moe=None, small=None)
    forward.gathered_tokens = tokens
    executor.steps.captures_later = False  # one rank would: the others know nothing of it


@dataclass(kw_only=True)
class DpLaunched:
    """The steps of all dp ranks in flight."""

    own: Launched
    decision: DpDecision
    steps: list[Step]


class DpLeader(Leader):
    """The executor of rank 0."""

    def __init__(self, executor: FastExecutor, ranks: RankLayout) -> None:
        super().__init__(executor)
        assert ranks.dp is not None
        self._tp, self._dp = ranks.tp.size, ranks.dp.size
        first = executor.encoder
        self.encoders = [first, *(first.of_another_rank() for _ in range(self._dp - 1))]

    def launch(self, decision: Decision) -> DpLaunched:  # type: ignore[override]
        assert isinstance(decision, DpDecision)
        common = self.executor.encoder.common_shape(decision.parts) if self.executor.pads_alike else None
        steps = [encoder.encode(part, common) for encoder, part in zip(self.encoders, decision.parts, strict=True)]
        sizes = () if common is not None else tuple(step.shape.tokens for step in steps)
        masks = [self.executor.masks(step, part) for step, part in zip(steps, decision.parts, strict=True)]
        for dp_rank, (step, own_masks) in enumerate(zip(steps, masks, strict=True)):
            to = range(max(1, dp_rank * self._tp), (dp_rank + 1) * self._tp)
            self.channel.send(RankMessage(step=step, masks=own_masks, sizes=sizes), to)
        tokens = self.executor.forward.gathered_tokens
        assert tokens is not None
        tokens.sizes = sizes
        with torch.inference_mode():
            own = self.executor.run(steps[0], decision.parts[0], masks[0])
        return DpLaunched(own=own, decision=decision, steps=steps)

    def tokens(self, launched: DpLaunched) -> list[int]:  # type: ignore[override]
        """Of all dp ranks, one after the other."""
        tokens = self.executor.tokens(launched.own)
        for dp_rank in range(1, self._dp):
            part, step = launched.decision.parts[dp_rank], launched.steps[dp_rank]
            if not part.empty:
                report = self.channel.receive_report(dp_rank * self._tp)
                tokens += self.executor.tokens(launched_elsewhere(part, step, report))
        return tokens
