"""A complete load test: probe the server, send, repeat, summarise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from armillary.errors import BadInput
from armillary.serving.load.client_lag import lag_of
from armillary.serving.load.multi_process import send_in_processes
from armillary.serving.load.probe import ProbedServer, probe
from armillary.serving.load.prompts import PromptMaker
from armillary.serving.load.record import RequestResult
from armillary.serving.load.schedule import num_shortened, planned_requests, warmup_s
from armillary.serving.load.sender import SendJob, Watch
from armillary.serving.load.summary import Summary, summary
from armillary.spec.tables.traffic import Load, Objective, Traffic

_UNLIMITED = float("inf")
_MIN_FOR_P99 = 100


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """The traffic of a load test, how it is sent, and its objectives."""

    __test__ = False  # not a pytest class

    traffic: Traffic
    load: Load
    objective: Objective

    def at_rate(self, requests_per_s: float) -> LoadTest:
        return replace(self, traffic=replace(self.traffic, requests_per_s=requests_per_s))


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run with the results of its requests, warm-up included; its summary is that of the window from `begin_s` to
    `end_s`."""

    summary: Summary
    results: tuple[RequestResult, ...]
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The report of a load test: one run per repeat."""

    url: str
    model: str
    api: str
    test: LoadTest
    runs: tuple[RunResult, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> Summary:
        return self.runs[-1].summary


Show = Callable[[int], Watch | None]
"""repeat -> progress callback"""


def load_test(url: str, test: LoadTest, *, key: str = "", show: Show = lambda repeat: None) -> LoadReport:
    """Test the server at `url`, with as many repeats as `test` has."""
    probed = probe(url, test.load, key=key)
    runs = [run_once(probed, test, repeat=i, watch=show(i)) for i in range(test.load.repeats)]
    return report_of(probed, test, runs)


def report_of(probed: ProbedServer, test: LoadTest, runs: Sequence[RunResult]) -> LoadReport:
    notes = [*probed.notes, *_notes(test, runs[-1])]
    target = probed.target
    return LoadReport(
        url=target.base, model=target.model, api=target.api, test=test, runs=tuple(runs), notes=tuple(notes)
    )


def sending_s(test: LoadTest) -> float:
    """Approximate sending time of one run, for a progress bar."""
    return warmup_s(test.traffic, test.load) + test.traffic.duration_s


def run_once(probed: ProbedServer, test: LoadTest, *, repeat: int = 0, watch: Watch | None = None) -> RunResult:
    """One run, with the seed of this repeat."""
    _check_length(probed, test)
    seed, load = test.traffic.seed + 1000 * repeat, test.load
    begin = warmup_s(test.traffic, load)
    job = _job(probed, test, seed)
    sent = send_in_processes(job, load.processes, watch)
    results = sent.results
    if not any(result.due_s >= begin for result in results):
        raise BadInput(
            f"no request was due in {test.traffic.duration_s:g} s at {test.traffic.requests_per_s:g} "
            "requests/s; try --set traffic.duration_s=60 or a higher --rate"
        )
    end = begin + test.traffic.duration_s
    if load.requests is not None:
        end = max(result.end_s for result in results) + 1e-9
    send_delays_s = [result.sent_s - result.due_s for result in results]
    lag = lag_of(sent.timer_delays_s, send_delays_s, sent.cpu_fraction)
    figures = summary(results, test.objective, lag, begin_s=begin, end_s=end)
    return RunResult(summary=figures, results=tuple(results), begin_s=begin, end_s=end)


def _check_length(probed: ProbedServer, test: LoadTest) -> None:
    """BadInput before the first request where the server would refuse most requests."""
    traffic, longest = test.traffic, probed.max_model_len
    if traffic.long_requests_per_s and test.load.concurrency:
        raise BadInput("traffic.long_requests_per_s needs the open loop; leave it or load.concurrency out")
    if longest is None or test.load.trace:
        return
    half = max(1, longest // 2)
    for key, stream in zip(("", "long_"), traffic.streams, strict=False):
        if stream.tokens_in + stream.tokens_out > longest:
            raise BadInput(
                f"{probed.target.model} takes {longest:,} tokens per request, this traffic has {stream.tokens_in:,} + "
                f"{stream.tokens_out:,}; try --set traffic.{key}tokens_in={half} --set traffic.{key}tokens_out="
                f"{min(stream.tokens_out, half)}"
            )


def _job(probed: ProbedServer, test: LoadTest, seed: int) -> SendJob:
    traffic, load = test.traffic, test.load
    prompts = PromptMaker(
        cut=probed.cut, overhead=probed.overhead, shared=traffic.shared_prefix, prefixes=load.prefixes, seed=seed
    )
    begin = warmup_s(traffic, load)
    rows = () if load.concurrency else tuple(enumerate(planned_requests(traffic, load, seed=seed)))
    stop = _UNLIMITED if load.requests is not None else begin + traffic.duration_s
    return SendJob(
        target=probed.target,
        prompts=prompts,
        traffic=traffic,
        load=load,
        rows=rows,
        clients=load.concurrency or 0,
        first=0,
        stride=1,
        warmup_s=begin,
        stop_s=stop,
        max_requests=load.requests,
    )


def _notes(test: LoadTest, run: RunResult) -> list[str]:
    figures, notes, lag = run.summary, [], run.summary.lag
    typical = figures.itl.p50_s or figures.ttft.p50_s
    if lag.limits(typical):
        way_out = (
            "use more processes (--set load.processes=2)"
            if lag.busy
            else "other work delays the generator; run it alone"
        )
        notes.append(
            f"the generator limits this test ({lag.cpu_fraction:.0%} of a core, its loop {1e3 * lag.loop_p99_s:.1f} ms "
            f"late and requests sent {1e3 * lag.send_p99_s:.1f} ms late at p99): {way_out} or on another machine"
        )
    if 0 < figures.ttft.count < _MIN_FOR_P99:
        notes.append(f"p99 of {figures.ttft.count} requests is their largest value; a longer test says more")
    if figures.e2e.count and not figures.requests_per_s:
        notes.append(
            f"every answer ended after the measured {figures.window_s:.0f} s, so none counts as completed in it: the "
            "server is slower than the offered rate; lower --rate or raise --duration"
        )
    if figures.counted_by == "usage" and figures.tokens_per_chunk > 1.05:
        notes.append(
            f"a streamed chunk holds {figures.tokens_per_chunk:.2f} tokens: ITL is the gap between chunks, TPOT "
            "the time per token"
        )
    if "chunks" in figures.counted_by:
        notes.append("tokens are counted as streamed chunks, because the server does not report them")
    shortened = num_shortened(planned_requests(test.traffic, test.load, seed=0), test.load) if test.load.trace else 0
    if shortened:
        notes.append(f"{shortened:,} requests of the trace were shortened to {test.load.longest:,} tokens")
    return notes
