"""A load test from beginning to end: probe the server, send, repeat, and sum up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from armillary.errors import BadInput
from armillary.serving.load.client_lag import lag_of
from armillary.serving.load.multi_process import drive_all
from armillary.serving.load.probe import Probed, probe
from armillary.serving.load.prompts import Texts
from armillary.serving.load.record import Answer
from armillary.serving.load.schedule import num_cut, planned, warmup_s
from armillary.serving.load.sender import Job, Watch
from armillary.serving.load.summary import Summary, summary
from armillary.spec.tables.load import Load
from armillary.spec.tables.serve import Objective, Traffic

_ENDLESS = float("inf")
_MANY = 100


@dataclass(frozen=True, kw_only=True)
class Test:
    """What is asked: one server, one kind of traffic."""

    __test__ = False  # not pytest's

    traffic: Traffic
    """what is sent, and when"""
    load: Load
    """how"""
    objective: Objective
    """what answers must meet"""

    def at_rate(self, requests_per_s: float) -> Test:
        return replace(self, traffic=replace(self.traffic, requests_per_s=requests_per_s))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run with its answers."""

    summary: Summary
    """its figures"""
    answers: tuple[Answer, ...]
    """in the order of completion, warm-up included"""
    begin_s: float
    """of the window"""
    end_s: float
    """of the window"""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load test found."""

    url: str
    """address of the server"""
    model: str
    """name it knows the model by"""
    api: str
    """chat or completions"""
    test: Test
    """what was asked"""
    runs: tuple[Ran, ...]
    """one a repeat"""
    notes: tuple[str, ...]
    """what a reader should know"""

    @property
    def last(self) -> Summary:
        return self.runs[-1].summary


Show = Callable[[int], Watch | None]
"""given the repeat, what is told of its progress"""


def load_test(url: str, test: Test, *, key: str = "", show: Show = lambda repeat: None) -> LoadReport:
    """Test the server at `url`, as often as `test` says."""
    probed = probe(url, test.load, key=key)
    runs = [run_once(probed, test, repeat=i, watch=show(i)) for i in range(test.load.repeats)]
    return report_of(probed, test, runs)


def report_of(probed: Probed, test: Test, runs: Sequence[Ran]) -> LoadReport:
    notes = [*probed.notes, *_notes(test, runs[-1])]
    target = probed.target
    return LoadReport(
        url=target.base, model=target.model, api=target.api, test=test, runs=tuple(runs), notes=tuple(notes)
    )


def sending_s(test: Test) -> float:
    """About how long one run sends, for a bar."""
    return warmup_s(test.traffic, test.load) + test.traffic.duration_s


def run_once(probed: Probed, test: Test, *, repeat: int = 0, watch: Watch | None = None) -> Ran:
    """One run with the seed of this repeat."""
    _check_length(probed, test)
    seed, load = test.traffic.seed + 1000 * repeat, test.load
    begin = warmup_s(test.traffic, load)
    job = _job(probed, test, seed)
    driven = drive_all(job, load.processes, watch)
    answers = driven.answers
    if not any(answer.due_s >= begin for answer in answers):
        raise BadInput(
            f"no request was due in {test.traffic.duration_s:g} s at {test.traffic.requests_per_s:g} a "
            "second; try --set traffic.duration_s=60 or a higher --rate"
        )
    end = begin + test.traffic.duration_s
    if load.requests is not None:
        end = max(answer.end_s for answer in answers) + 1e-9
    late = [answer.sent_s - answer.due_s for answer in answers]
    found = summary(answers, test.objective, lag_of(driven.late_s, late, driven.cpu_fraction), begin_s=begin, end_s=end)
    return Ran(summary=found, answers=tuple(answers), begin_s=begin, end_s=end)


def _check_length(probed: Probed, test: Test) -> None:
    """Refused before the first request, where the server would refuse most of them."""
    asked, longest = test.traffic, probed.longest
    if longest is None or test.load.trace or asked.tokens_in + asked.tokens_out <= longest:
        return
    half = max(1, longest // 2)
    raise BadInput(
        f"{probed.target.model} takes {longest:,} tokens a request, this traffic has {asked.tokens_in:,} + "
        f"{asked.tokens_out:,}; try --set traffic.tokens_in={half} --set traffic.tokens_out="
        f"{min(asked.tokens_out, half)}"
    )


def _job(probed: Probed, test: Test, seed: int) -> Job:
    traffic, load = test.traffic, test.load
    texts = Texts(
        cut=probed.cut, overhead=probed.overhead, shared=traffic.shared_prefix, prefixes=load.prefixes, seed=seed
    )
    begin = warmup_s(traffic, load)
    rows = () if load.concurrency else tuple(enumerate(planned(traffic, load, seed=seed)))
    stop = _ENDLESS if load.requests is not None else begin + traffic.duration_s
    return Job(
        target=probed.target,
        texts=texts,
        traffic=traffic,
        load=load,
        rows=rows,
        clients=load.concurrency or 0,
        first=0,
        stride=1,
        warmup_s=begin,
        stop_s=stop,
        most=load.requests,
    )


def _notes(test: Test, ran: Ran) -> list[str]:
    found, notes, lag = ran.summary, [], ran.summary.lag
    typical = found.itl.p50_s or found.ttft.p50_s
    if lag.limits(typical):
        way_out = "use more processes (--set load.processes=2)" if lag.busy else "other work delays it; run it alone"
        notes.append(
            f"the generator limits this test ({lag.cpu_fraction:.0%} of a core, its loop {1e3 * lag.loop_p99_s:.1f} ms "
            f"late and requests sent {1e3 * lag.send_p99_s:.1f} ms late at p99): {way_out} or on another machine"
        )
    if 0 < found.ttft.count < _MANY:
        notes.append(f"p99 of {found.ttft.count} requests is their largest value; a longer test says more")
    if found.counted_by == "usage" and found.tokens_a_piece > 1.05:
        notes.append(
            f"a streamed piece holds {found.tokens_a_piece:.2f} tokens: ITL is the gap between pieces, TPOT "
            "the time of a token"
        )
    if "chunks" in found.counted_by:
        notes.append("tokens are counted as streamed pieces, because the server does not count them")
    cut = num_cut(planned(test.traffic, test.load, seed=0), test.load) if test.load.trace else 0
    if cut:
        notes.append(f"{cut:,} requests of the trace were cut to {test.load.longest:,} tokens")
    return notes
