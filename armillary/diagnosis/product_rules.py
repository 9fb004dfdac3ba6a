"""The product loop: what keeps requests waiting, stretches gaps between tokens or computes in vain.

Several of these show as the same queue. A rule fires where its cause is the deepest that explains it: batches that are
put together, then rows, blocks and budgets that are too small; only where a server is set well and still cannot keep up
are there too few of them.
"""

from __future__ import annotations

from collections.abc import Callable

from armillary.diagnosis.finding import Evidence, Finding
from armillary.diagnosis.reading import Reading
from armillary.diagnosis.service import Service
from armillary.spec.plan import Plan
from armillary.units import seconds_text

WAITS = 0.1
"""of the time in steps, or of a request's time: below it a queue is the chance of arrivals, not a cause"""
CROWDED = 0.25
"""of both: a server that is well used has short queues now and then, one that cannot keep up has them all along"""
EXPLAINS = 0.15
"""of the time in steps: a server that is so much quicker may not have the queue; one that is less so still has it"""
GAINS = 0.05
"""of the time: what would save less is not worth a line"""
PUT_BACK = 0.1
"""preemptions a request: more than one in ten, and put back is what they are, not unlucky"""
COMPUTED_AGAIN = 0.03
"""of all tokens computed"""
IN_VAIN = 0.1
"""of prompt tokens that were there before and are computed again"""
EVICTED = 0.05
"""of requests: those of which more would have been found a moment before"""
STRETCHED = 4.0
"""times the usual gap: steps with prompts in them are always longer, but a well chosen budget keeps them below it"""
NOTICED_S = 0.02
"""a gap: nobody reads or speaks faster than fifty tokens a second"""
SOMETIMES = 0.01
"""of tokens: what the 99th percentile sees"""
FAR_BELOW = 0.35
"""of the roof: a GPU's step of kernels that do run reaches more, even at one row"""
OVERHEAD = 0.15
"""of a step in which the device has nothing to do because the host decides"""

Rule = Callable[[Reading, Plan | None], Finding | None]


def static_batching(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait for a batch to end, or to be put together, while rows are free."""
    here = Service(reading, plan)
    if here.serve.batching == "continuous" or max(here.queued_share, here.queue_share) < WAITS:
        return None  # where a window is waited for, there are no steps
    share = _with_queue(here, here.share_saved(min(here.serve.max_running, max(here.wanted, here.decoding))))
    if share < GAINS:
        return None
    return Finding(
        loop="product", cause="static_batching", rule="static_batching", share=share,
        says=f"batching is {here.serve.batching}: {here.decoding:.1f} of {here.serve.max_running} rows decode while "
             f"{here.wanted:.0f} requests are there", evidence=(
            Evidence(gauge="decode_tokens", value=here.decoding, expected=float(here.serve.max_running),
                     against="rows of the batch"),
            _waiting(here), _queue(here)),
    )  # fmt: skip


def batch_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Every row is taken, requests wait, and more rows would make steps little longer."""
    here = Service(reading, plan)
    if here.serve.batching != "continuous" or here.door != "rows" or here.doors["rows"] < WAITS:
        return None
    saved = here.share_saved(min(here.wanted, _rows_that_fit(here)))
    if saved < GAINS:
        return None
    return Finding(
        loop="product", cause="batch_too_small", rule="batch_too_small",
        share=_with_queue(here, saved),
        says=f"all {here.serve.max_running} rows are taken while {here.wanted - here.serve.max_running:.0f} wait and "
             f"{1 - (reading.get('kv_used_fraction') or 0):.0%} of the KV cache is free", evidence=(
            Evidence(gauge="running", value=here.serve.max_running, expected=here.wanted, against="requests there"),
            _waiting(here), _blocks(here), _queue(here)),
    )  # fmt: skip


def kv_pressure(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait for blocks of the KV cache while rows and budget are free."""
    here = Service(reading, plan)
    if here.door != "blocks" or here.doors["blocks"] < WAITS or _put_back(here):
        return None
    return _blocks_lacking(here, "kv_pressure")


def preemption(reading: Reading, plan: Plan | None) -> Finding | None:
    """Running requests are put back for lack of blocks, and computed again."""
    here = Service(reading, plan)
    if not _put_back(here):
        return None
    return _blocks_lacking(here, "preemption")


def prefix_cache_off(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts begin alike and are computed anew each time, because nothing is kept."""
    here = Service(reading, plan)
    return _misses(here, "prefix_cache_off", "the prefix cache is off") if not here.serve.prefix_cache else None


def prefix_cache_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts begin alike, but what was kept had to make room before it was asked for again."""
    here = Service(reading, plan)
    evicted, ended = here.total("prefix_evicted_total"), here.total("requests_total")
    if not here.serve.prefix_cache or evicted < EVICTED * max(1.0, ended):
        return None  # what came twice at once was not there to be found
    if (here.door == "blocks" and here.doors["blocks"] >= WAITS) or _put_back(here):
        return None  # running requests lack blocks themselves: that is the deeper cause
    return _misses(here, "prefix_cache_too_small", "the KV cache is too small to keep them")


def prefill_interference(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts computed in one piece hold up everybody who decodes."""
    here = Service(reading, plan)
    usual, worst = reading.get("itl_p50_s"), reading.get("itl_p99_s")
    if usual is None or worst is None or here.cost is None:
        return None
    limit = here.objective.itl_p99_s or (None if here.batch_job else max(STRETCHED * _alone_s(here), NOTICED_S))
    if limit is None or worst <= limit or here.stretched(limit) < SOMETIMES:
        return None
    alone = min(worst, _alone_s(here))
    return Finding(
        loop="product", cause="prefill_interference", rule="prefill_interference", share=1 - max(alone, limit) / worst
        if here.objective.itl_p99_s else 1 - alone / worst,
        says=f"one gap in a hundred between tokens is {seconds_text(worst)} or more, {worst / alone:.0f} times a step "
             f"without prompts: up to {_largest(here):,.0f} prompt tokens go into a step beside decodes", evidence=(
            Evidence(gauge="itl_p99_s", value=worst, expected=limit,
                     against="objective" if here.objective.itl_p99_s else f"{STRETCHED:g} × a step without prompts"),
            Evidence(gauge="itl_p50_s", value=usual),
            Evidence(gauge="prefill_tokens", value=_largest(here), expected=float(here.serve.max_tokens_per_step),
                     against="budget of a step")),
    )  # fmt: skip


def queueing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts wait for their turn in steps whose budget for them is so small that each mostly costs its base."""
    here = Service(reading, plan)
    late = "ttft_p99_s" in here.missed and here.filled_share >= CROWDED  # nobody waits, but all go in slowly
    kept_out = here.door == "budget" and here.doors["budget"] >= WAITS
    if not (kept_out or late) or here.cost is None or _in_vain(here) >= GAINS:
        return None
    tokens = _mean(reading, "prefill_tokens")
    alone = [one for one in reading.steps if one.get("prefill_tokens") and not one.get("decode_tokens")]
    saved = max(here.share_saved(min(here.wanted, here.rows)), len(alone) * here.cost.base_s / 2 / here.busy_s,
                _prompt_of_ttft(here) * here.filled_share if late else 0.0)  # fmt: skip
    if saved < GAINS:
        return None
    return Finding(
        loop="product", cause="queueing", rule="queueing", share=_with_queue(here, min(0.99, saved)),
        says=f"requests wait while steps take {tokens:.0f} prompt tokens at a time, which cost "
             f"{tokens * here.cost.prefill_s / max(here.cost.base_s, 1e-12):.1f} times what a step costs anyway",
        evidence=(
            Evidence(gauge="prefill_tokens", value=tokens, expected=float(here.serve.max_tokens_per_step),
                     against="budget of a step"), _waiting(here), _queue(here)),
    )  # fmt: skip


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests come faster than the server answers them. Whatever else is wrong with it comes first: this is what is
    left where nothing else helps."""
    here = Service(reading, plan)
    crowded = here.queued_share >= CROWDED and here.queue_share >= CROWDED
    refused = here.total("rejected_total") > GAINS * max(1.0, here.total("requests_total"))
    if not (crowded or refused) or (here.batch_job and not here.missed):
        return None
    deeper = [found.share for rule in DEEPER if (found := rule(reading, plan)) is not None]
    share = max(here.queue_share, CROWDED if refused else 0.0)
    return Finding(
        loop="product", cause="too_few_replicas", rule="too_few_replicas", share=min([share, *_behind(deeper)]),
        says=f"requests come faster than one server answers them: they spend {here.queue_share:.0%} of their time "
             "waiting", evidence=(
            _queue(here), _waiting(here),
            Evidence(gauge="running", value=_mean(reading, "running"), expected=float(here.rows), against="rows")),
    )  # fmt: skip


def graphs_off(reading: Reading, plan: Plan | None) -> Finding | None:
    """On a GPU, steps take as long as their launches: the device idles between kernels."""
    here = Service(reading, plan)
    if here.serve.graphs or not _on_gpu(plan) or here.cost is None:
        return None
    reached, waited = reading.get("engine_roof_fraction"), reading.get("engine_wait_s")
    step = reading.get("engine_step_s") or 0.0
    host_bound = waited is not None and step > 0 and waited < 0.5 * step
    if not host_bound or (reached is not None and reached > FAR_BELOW):
        return None
    share = 1 - (waited or 0.0) / step
    found = [Evidence(gauge="engine_wait_s", value=waited or 0.0, expected=step, against="a whole step")]
    if reached is not None:
        found.append(Evidence(gauge="engine_roof_fraction", value=reached, expected=FAR_BELOW,
                              against="launches hidden"))  # fmt: skip
    return Finding(
        loop="inner", cause="launch_overhead", rule="graphs_off", share=share,
        says=f"CUDA graphs are off and the host is busy for {share:.0%} of a step of {seconds_text(step)}, launching "
             "kernels that the device is done with before the next comes", evidence=tuple(found),
    )  # fmt: skip


def deciding_alone(reading: Reading, plan: Plan | None) -> Finding | None:
    """Without overlap the device has nothing to do while the next step is decided."""
    here = Service(reading, plan)
    decided, step = reading.get("engine_schedule_s"), reading.get("engine_step_s")
    if here.serve.overlap or not _on_gpu(plan) or not decided or not step or decided < OVERHEAD * step:
        return None
    return Finding(
        loop="inner", cause="sync", rule="deciding_alone", share=min(0.99, decided / step),
        says=f"the device waits {seconds_text(decided)} of every {seconds_text(step)} while the next step is decided",
        evidence=(Evidence(gauge="engine_schedule_s", value=decided, expected=OVERHEAD * step,
                           against="most a healthy run has"),),
    )  # fmt: skip


# --- parts


def _with_queue(here: Service, saved: float) -> float:
    """The share of a cause that saves so much of the steps' time: where that is a good part, the queue goes with it."""
    return saved if here.batch_job or saved < EXPLAINS else max(saved, here.queue_share)


def _put_back(here: Service) -> bool:
    """Whether preemption is what happens, and not bad luck now and then."""
    put_back, again = here.total("preemptions_total"), here.total("recomputed_total")
    done = here.total("tokens_in_total") + here.total("tokens_out_total")
    ended = here.total("requests_total") or len(here.reading.requests)
    return bool(put_back) and (put_back > PUT_BACK * max(1.0, ended) or again > COMPUTED_AGAIN * max(1.0, done))


def _blocks_lacking(here: Service, cause: str) -> Finding | None:
    reading, cost = here.reading, here.cost
    again = here.total("recomputed_total")
    in_vain = again * cost.prefill_s / here.whole_s if cost is not None and here.whole_s else 0.0
    saved = min(0.99, here.share_saved(min(here.wanted, here.serve.max_running)) + in_vain)
    share = _with_queue(here, saved)
    if share < GAINS:
        return None
    put_back = here.total("preemptions_total")
    how = (f"{put_back:.0f} times a running request was put back, {again:,.0f} tokens computed again" if put_back else
           f"{here.decoding:.0f} of {here.serve.max_running} rows decode while {here.wanted:.0f} requests are there")
    return Finding(
        loop="product", cause="preemption" if cause == "preemption" else "kv_pressure", rule=cause, share=share,
        says=f"the KV cache of {reading.get('kv_capacity_tokens') or 0:,.0f} tokens is too small for what comes: {how}",
        evidence=(_blocks(here), Evidence(gauge="preemptions_total", value=put_back), _waiting(here), _queue(here)),
    )  # fmt: skip


def _in_vain(here: Service) -> float:
    """Share of the time in steps spent on prompt tokens that were there before."""
    return here.prompt_share * min(1.0, here.not_found / here.computed) if here.computed else 0.0


def _misses(here: Service, rule: str, why: str) -> Finding | None:
    asked = here.total("tokens_in_total") or here.computed
    if here.not_found < IN_VAIN * max(1.0, asked):
        return None
    saved = _in_vain(here)
    of_first = min(0.99, here.not_found / max(1.0, here.computed)) * _prompt_of_ttft(here)
    share = saved if here.batch_job else max(_with_queue(here, saved), of_first)
    if share < GAINS:
        return None
    return Finding(
        loop="product", cause="cache_misses", rule=rule, share=share,
        says=f"{here.not_found / max(1.0, asked):.0%} of prompt tokens were there before and are computed again: {why}",
        evidence=(
            Evidence(gauge="prefix_hits_total", value=here.total("prefix_hits_total"), expected=here.repeated,
                     against="prompt tokens that came before"),
            Evidence(gauge="prefix_evicted_total", value=here.total("prefix_evicted_total")),
            Evidence(gauge="tokens_in_total", value=asked)),
    )  # fmt: skip


def _behind(shares: list[float]) -> list[float]:
    """Just below those that explain the queue."""
    return [0.95 * share for share in shares if share >= EXPLAINS]


def _prompt_of_ttft(here: Service) -> float:
    """Share of the time to first token in which the prompt was computed."""
    known = [one for one in here.reading.requests if "ttft_s" in one and "prefill_s" in one]
    whole = sum(float(one["ttft_s"]) for one in known)
    return sum(float(one["prefill_s"]) for one in known) / whole if whole else 0.0


def _alone_s(here: Service) -> float:
    """A step of the usual decodes without prompts."""
    assert here.cost is not None
    return here.cost.seconds(0, here.decoding, here.decoding * here.context)


def _largest(here: Service) -> float:
    found = [float(one["prefill_tokens"]) for one in here.reading.steps
             if one.get("decode_tokens") and one.get("prefill_tokens")]  # fmt: skip
    return max(found, default=0.0)


def _rows_that_fit(here: Service) -> float:
    """Rows whose blocks the KV cache holds, as those of now do."""
    used = here.reading.series("kv_used_fraction")
    rows = here.reading.series("running")
    each = max((a / b for a, b in zip(used, rows, strict=True) if b), default=0.0) if len(used) == len(rows) else 0.0
    return 1 / each if each else float("inf")


def _mean(reading: Reading, gauge: str) -> float:
    found = [value for value in reading.series(gauge) if value]
    return sum(found) / len(found) if found else 0.0


def _waiting(here: Service) -> Evidence:
    return Evidence(gauge="waiting", value=_mean(here.reading, "waiting"), expected=0.0, against="nobody waits")


def _queue(here: Service) -> Evidence:
    return Evidence(gauge="queue_p50_s", value=here.reading.get("queue_p50_s") or 0.0,
                    expected=here.reading.get("e2e_p50_s"), against="the whole time of a request")  # fmt: skip


def _blocks(here: Service) -> Evidence:
    values = [float(one["kv_used_fraction"]) for one in here.queued or here.reading.steps if "kv_used_fraction" in one]
    return Evidence(gauge="kv_used_fraction", value=sum(values) / len(values) if values else 0.0, expected=1.0,
                    against="all blocks")  # fmt: skip


def _on_gpu(plan: Plan | None) -> bool:
    return plan is not None and plan.cluster.chip.kind == "gpu"


DEEPER: tuple[Rule, ...] = (static_batching, batch_too_small, kv_pressure, preemption, prefix_cache_off,
                            prefix_cache_too_small, queueing, graphs_off)  # fmt: skip
"""what a server that cannot keep up may suffer from instead of being too few"""
RULES: tuple[Rule, ...] = (*DEEPER, prefill_interference, too_few_replicas, deciding_alone)
