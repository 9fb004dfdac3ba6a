"""Generation times of a replica: a static batch, an offline queue, and a full batch in steady state.

    static batch      T = prefill(batch · in) + Σ decode(batch, in + i);  tokens/s = batch · out / T
    offline           `requests` queued at once, `batch` at a time: waves of equal requests,
                      T = requests · prefill + Σ over waves of out · decode(wave)
    steady state      every request costs its prefill once and a share of `out` decode steps:
                      requests/s = batch / (batch · prefill + out · decode(batch))

With pipeline stages, pp batches are in flight, each with a pp-th of the requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from armillary.planning.serving.forward_ops import Group
from armillary.planning.serving.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Times of a batch of equal requests: the mean inter-token latency of each, and the tokens per second of all."""

    ttft_s: float
    itl_s: float
    total_s: float
    tokens_out_per_s: float


def static_batch(replica: Replica, batch: int, tokens_in: int, tokens_out: int) -> Generation:
    """All prompts together, then all decode steps together (gptSessionBenchmark, batch-1 loops)."""
    prefill = replica.prefill(tokens_in, batch).total_s
    gap = mean_decode_s(replica, batch, tokens_in, tokens_out)
    total = prefill + (tokens_out - 1) * gap
    return Generation(ttft_s=prefill, itl_s=gap, total_s=total, tokens_out_per_s=batch * tokens_out / total)


def steady_state(replica: Replica, batch: int, tokens_in: int, tokens_out: int, chunk: int = 8192) -> Generation:
    """A full batch: a finished request is replaced at once, prompts are computed between decode steps."""
    gap = mean_decode_s(replica, batch, tokens_in, tokens_out)
    cycle = batch * prefill_share_s(replica, tokens_in, chunk) + tokens_out * gap
    return Generation(
        ttft_s=replica.prefill(tokens_in).total_s,
        itl_s=cycle / tokens_out,
        total_s=cycle,
        tokens_out_per_s=batch * tokens_out / cycle,
    )


def offline(
    replica: Replica,
    requests: int,
    batch: int,
    tokens_in: int,
    tokens_out: int,
    captured: Sequence[int] = (),
    *,
    chunk: int = 8192,
    cached: int = 0,
) -> Generation:
    """All requests queued at once, as throughput benchmarks do (`vllm bench serve --request-rate inf`): equal ones
    finish together, so they run in waves, the last of which may be small. Decode steps are padded to the batch sizes
    `captured` in CUDA graphs; the first `cached` prompt tokens are in the prefix cache."""
    full_waves, rest = divmod(requests, batch)
    full = mean_decode_s(replica, min(batch, requests), tokens_in, tokens_out, captured)
    last = mean_decode_s(replica, rest, tokens_in, tokens_out, captured) if rest and full_waves else full
    waves = full_waves * full + (last if rest else 0.0)
    computed = tokens_in - cached
    total = requests * prefill_share_s(replica, computed, chunk, cached) + tokens_out * waves
    return Generation(
        ttft_s=replica.prefill(computed, cached=cached).total_s,
        itl_s=full,
        total_s=total,
        tokens_out_per_s=requests * tokens_out / total,
    )


def prefill_share_s(replica: Replica, tokens_in: int, chunk: int = 8192, cached: int = 0) -> float:
    """Seconds per prompt when as many are batched as fit a step of `chunk` tokens per rank; pipeline stages work on
    different prompts, so pp of them take the time of one."""
    count = max(1, chunk // tokens_in) * replica.split.ep
    return replica.prefill(tokens_in, count, cached).total_s / count / replica.split.pp


def mean_decode_s(replica: Replica, batch: int, tokens_in: int, tokens_out: int, captured: Sequence[int] = ()) -> float:
    """Mean decode step as contexts grow from `tokens_in` to `tokens_in + tokens_out` (Simpson's rule: a step is linear
    in the context, except where a window fills)."""
    first, last = tokens_in, max(tokens_in, tokens_in + tokens_out - 2)
    times = [decode_gap_s(replica, batch, context, captured) for context in (first, (first + last) // 2, last)]
    return (times[0] + 4 * times[1] + times[2]) / 6


def decode_gap_s(replica: Replica, batch: int, context: int, captured: Sequence[int] = ()) -> float:
    """Seconds between two tokens of each of `batch` requests: one step; with pipeline stages each pp-th of the requests
    passes through all of them, and the others wait for the last stage, which has the output projection too. Rows that
    only fill a graph attend to a token."""
    stages = replica.split.pp
    in_flight = ceil(batch / stages)
    waiting = (stages - 1) * replica.head_s(in_flight) if stages > 1 else 0.0
    ranks = replica.split.ep
    rows = ceil(in_flight / ranks)
    filling = next((size for size in captured if size >= rows), rows) - rows
    running = Group(count=in_flight, queries=1, keys=context + 1)
    groups = [running, Group(count=filling * ranks, queries=1, keys=2)] if filling else [running]
    return replica.step(groups).total_s + waiting
