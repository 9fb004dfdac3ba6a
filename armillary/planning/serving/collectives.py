"""Time of the collectives of an engine step, between the ranks of one replica.

all-reduce    a + 2·log2(tp)·latency + 2(tp−1)/tp · bytes / (link · share)    one per sub-layer (Thakur et al. 2005;
                                                                              (tp+1)/tp where the switch reduces)
all-to-all    rows to the ranks of their experts and back
all-gather    every row to every rank, then a reduce-scatter: engines that keep it simple send experts' rows so; ours
              adds up the results on every rank instead (gather-sum)
send          between pipeline stages
"""

from dataclasses import dataclass
from math import log2
from typing import Literal

from armillary.planning.device_model.network import link_speed
from armillary.planning.serving.engines import Rates
from armillary.planning.serving.forward_ops import Split
from armillary.spec.arithmetic.non_gemm_ops import wire_factor
from armillary.spec.arithmetic.ops import size_of
from armillary.spec.hardware import Cluster
from armillary.spec.model import ModelConfig

Dispatch = Literal["all-to-all", "all-gather", "gather-sum"]
RING_S, RING_STEP_S = 14e-6, 1.9e-6
"""start and step between two ranks of NCCL's ring over NVLink with its LL128 protocol, from the model by which it
chooses (src/graph/tuning.cc, 2.2x)"""
SKEW, BALANCED_SKEW = 1.3, 1.1
"""rows of the most loaded expert rank over the mean, where experts are spread over ranks and not replicated: every step
waits for it. A judgement, not measured here; less where training balances the router by a bias (DeepSeek-V3)"""
SCALED_FP4 = 0.5 + 1 / 16
"""bytes per 4-bit activation with its scale"""


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Seconds of collectives of one replica."""

    config: ModelConfig
    cluster: Cluster
    split: Split
    rates: Rates
    compute: str
    """dtype of the rows that experts get"""
    dispatch: Dispatch = "all-to-all"

    @property
    def skew(self) -> float:
        """Rows of the most loaded expert rank over the mean."""
        if self.split.ep == 1 or self.config.moe is None:
            return 1.0
        return BALANCED_SKEW if self.config.moe.selection_bias else SKEW

    def step_s(self, tokens: int) -> float:
        """All of a step over `tokens` of one ep rank."""
        config, split = self.config, self.split
        row_bytes = config.hidden * size_of("bf16")
        sub_layers = 1 if config.parallel != "none" else 2
        seconds = config.num_layers * sub_layers * self.allreduce_s(tokens * row_bytes)
        if split.ep > 1 and config.moe is not None:
            gathers = self.dispatch != "all-to-all"
            send = self._gather_s if gathers else self._all_to_all_s
            bytes_in = SCALED_FP4 if gathers and self.compute == "fp4" else size_of(self.compute)
            back = 2 if self.dispatch == "gather-sum" else 1  # an all-reduce is a reduce-scatter and an all-gather
            seconds += config.num_moe_layers * (send(tokens, bytes_in) + back * send(tokens, size_of("bf16")))
        if split.pp > 1:
            seconds += (split.pp - 1) * self._wire_s(tokens * row_bytes / split.tp, split.num_devices, 1)
        return seconds

    def allreduce_s(self, num_bytes: float) -> float:
        """All-reduce of `num_bytes` among the tp ranks; a switch that reduces takes and returns the bytes once."""
        tp = self.split.tp
        if tp == 1:
            return 0.0
        tier, factor = self.cluster.tier_spanning(tp), wire_factor("all_reduce", tp)
        if tier is not None and tier.link.in_network_reduction:
            factor = min(factor, (tp + 1) / tp)
        return self._wire_s(num_bytes * factor, tp, 2 * log2(tp))

    def _gather_s(self, tokens: int, bytes_each: float) -> float:
        """Rows of every rank to every other, or the sums of what experts made of them back, by NCCL."""
        ranks = self.split.ep
        speed, latency = link_speed(self.cluster.tier_spanning(ranks))
        wire = tokens * self.config.hidden * bytes_each * (ranks - 1)
        return RING_S + (ranks - 1) * max(RING_STEP_S, latency) + wire / (speed * self.rates.link)

    def _all_to_all_s(self, tokens: int, bytes_each: float) -> float:
        """Rows to the ranks of their experts, or back: between nodes a row is sent once to each node with one of its
        experts (group-limited routing bounds those), inside a node to each of them (DeepSeek-V3, arXiv 2412.19437)."""
        moe, ranks = self.config.moe, self.split.ep * self.split.tp
        assert moe is not None
        inside = min(ranks, self.cluster.fast_domain)
        row = self.skew * tokens * self.config.hidden * bytes_each / self.split.tp
        within = self._wire_s(row * moe.top_k * (inside - 1) / inside, inside, log2(max(2, inside)))
        nodes = -(-ranks // inside)
        if nodes == 1:
            return within
        targets = min(nodes * (1 - (1 - 1 / nodes) ** moe.top_k), moe.top_groups if moe.groups > 1 else nodes)
        return max(within, self._wire_s(row * targets * (nodes - 1) / nodes, ranks, log2(nodes)))

    def _wire_s(self, wire_bytes: float, span: int, hops: float) -> float:
        """Start-up, hops and bytes over the slowest link that `span` neighbours cross."""
        speed, latency = link_speed(self.cluster.tier_spanning(span))
        return self.rates.allreduce_s * self.rates.fixed_time + hops * latency + wire_bytes / (speed * self.rates.link)
