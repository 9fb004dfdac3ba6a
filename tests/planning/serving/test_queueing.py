"""The load formulas against their slow twin: requests that arrive one by one, stepped through one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from armillary.planning.serving.capacity import sustainable
from armillary.planning.serving.forward_ops import Split
from armillary.planning.serving.queueing import Server, _poisson_quantile, operating_point
from armillary.planning.serving.replica import Replica
from armillary.spec import catalogue
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Objective, Traffic


@dataclass
class Seen:
    """What the twin saw."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    busy: float = 0.0
    """requests running, times seconds"""
    seconds: float = 0.0


def step_through(server: Server, rate: float, requests: int) -> Seen:
    """Continuous batching by hand: decodes first, prompts fill the step budget, steps priced as the formulas price
    them, so that only the queueing differs."""
    arrivals = list(np.cumsum(np.random.default_rng(0).exponential(1 / rate, requests)))
    per_token, budget = server.prefill_s / server.prompt, server.serve.max_tokens_per_step
    waiting: list[list[float]] = []
    running: list[int] = []
    seen = Seen()
    while arrivals or waiting or running:
        while arrivals and arrivals[0] <= seen.seconds:
            waiting.append([arrivals.pop(0), server.prompt])
        if not waiting and not running:
            seen.seconds = arrivals[0]
            continue
        room, tokens, first = budget - len(running), 0.0, []
        while waiting and room > 0 and len(running) + len(first) < server.most_running:
            part = min(room, waiting[0][1])
            waiting[0][1] -= part
            room, tokens = room - part, tokens + part
            if waiting[0][1] == 0:
                first.append(waiting.pop(0)[0])
        step = (server.decode_s(len(running)) if running else 0.0) + tokens * per_token
        seen.seconds += step
        seen.busy += step * len(running)
        seen.gaps += [step] * len(running)
        seen.ttft += [seen.seconds - arrival for arrival in first]
        running = [left - 1 for left in running if left > 1] + [server.traffic.tokens_out - 1] * len(first)
    return seen


CASES = {
    "llama-3.1-8b on h100": ("llama-3.1-8b", "h100", Split(), Traffic(tokens_in=1000, tokens_out=150)),
    "llama-3.1-8b on l4": ("llama-3.1-8b", "l4", Split(), Traffic(tokens_in=500, tokens_out=100)),
    "llama-3.1-70b, long prompts": ("llama-3.1-70b", "h100x4", Split(tp=4), Traffic(tokens_in=6000, tokens_out=100)),
}


@pytest.mark.parametrize("share", [0.3, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_formulas_agree_with_the_slow_twin(name: str, share: float) -> None:
    model, on, split, traffic = CASES[name]
    replica = Replica(config=catalogue.model(model).config, cluster=catalogue.cluster(on), split=split)
    server = Server(replica=replica, serve=Serve(), traffic=traffic)
    rate = share * sustainable(server, Objective()).requests_per_s
    found, seen = operating_point(server, rate), step_through(server, rate, 1200)
    assert found is not None
    assert found.running == pytest.approx(seen.busy / seen.seconds, rel=0.2)
    assert found.step_s == pytest.approx(np.mean(seen.gaps), rel=0.2)
    assert found.itl_p50_s == pytest.approx(np.median(seen.gaps), rel=0.15)
    assert found.ttft_p50_s == pytest.approx(np.median(seen.ttft), rel=0.25)
    assert found.ttft_p99_s == pytest.approx(np.percentile(seen.ttft, 99), rel=0.35)
    assert found.itl_p99_s >= 0.85 * np.percentile(seen.gaps, 99)


@pytest.mark.parametrize("mean", [0.0, 1e-6, 0.3, 0.7, 4.2, 31.0, 450.0, 800.0])
@pytest.mark.parametrize("quantile", [0.5, 0.99])
def test_poisson_quantile(mean: float, quantile: float) -> None:
    """Against scipy's distribution; from a mean of 746 e^(-mean) is no double, and near 1,000 the answer is capped."""
    from scipy.stats import poisson

    assert _poisson_quantile(mean, quantile) == min(1000, max(0, int(poisson.ppf(quantile, mean))))
