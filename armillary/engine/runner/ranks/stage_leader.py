"""Pipeline stages of the engine: rank 0, on the first stage, sends every step to all ranks, and the last stage samples.

Rank 0 does not wait for what a step gives before it launches the next: the first rank of the last stage reports it. The
tokens that decodes follow go with their step to all stages, since the first looks up their embeddings.
"""

from dataclasses import dataclass

import numpy as np
import torch

from armillary.engine.runner.executor import FastExecutor, Launched
from armillary.engine.runner.rank_layout import RankLayout
from armillary.engine.runner.ranks.step_reports import launched_elsewhere
from armillary.engine.runner.step_bytes import RankMessage
from armillary.engine.runner.step_input import Ints, Step
from armillary.engine.runner.tensor_parallel import Leader
from armillary.engine.scheduler.decision import Decision


@dataclass(kw_only=True)
class StagesLaunched:
    """A step in flight."""

    own: Launched
    """of the first stage"""
    decision: Decision
    step: Step


class StageLeader(Leader):
    """The executor of rank 0."""

    def __init__(self, executor: FastExecutor, ranks: RankLayout) -> None:
        super().__init__(executor)
        assert ranks.pipeline is not None
        self._last = ranks.pipeline.ranks[-1]

    def launch(self, decision: Decision) -> StagesLaunched:  # type: ignore[override]
        step = self.executor.encode(decision)
        step.known = known_tokens(decision)
        masks = self.executor.masks(step, decision)
        self.channel.send(RankMessage(step=step, masks=masks))
        with torch.inference_mode():
            own = self.executor.run(step, decision, masks)
        return StagesLaunched(own=own, decision=decision, step=step)

    def tokens(self, launched: StagesLaunched) -> list[int]:  # type: ignore[override]
        report = self.channel.receive_report(self._last)
        if launched.own.done is not None:
            launched.own.done.synchronize()
        self.executor.expert_counters.arrived(launched.own.expert_counts_LE)
        return self.executor.tokens(launched_elsewhere(launched.decision, launched.step, report))


def known_tokens(decision: Decision) -> Ints | None:
    """[3, n]: rows, positions and tokens that the decodes of a step begin with; those of drafts are `Step.drafts`."""
    decodes = list(zip(decision.decodes, decision.rows, decision.positions, strict=True))[: decision.num_decodes]
    if not decodes:
        return None
    return np.array([(row, at, seq.tokens[at]) for seq, row, at in decodes], dtype=np.int32).T
