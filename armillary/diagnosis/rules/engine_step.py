"""Rules on engine steps: prefill that stretches decodes, and a host that holds the device up."""

from armillary.diagnosis.evidence.finding import Evidence, Finding
from armillary.diagnosis.evidence.serving_run import ServingRun
from armillary.diagnosis.evidence.thresholds import (
    CHOSEN_ITL_STRETCH,
    GRAPHS_ROOFLINE_FRACTION,
    HOST_BOUND_WAIT_SHARE,
    ITL_STRETCH,
    NOTICEABLE_GAP_S,
    REPEATED_PREFILL_SHARE,
    SCHEDULE_SHARE,
    STRETCHED_TOKEN_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import seconds_text


def prefill_interference(reading: Reading, plan: Plan | None) -> Finding | None:
    """Large prefill chunks hold up all decodes of the step."""
    run = ServingRun(reading, plan)
    usual, worst = reading.get("itl_p50_s"), reading.get("itl_p99_s")
    if usual is None or worst is None or run.cost is None:
        return None
    chosen = run.serve.prefill_tokens is not None or run.serve.prefill_slowdown is not None
    times = ITL_STRETCH * (CHOSEN_ITL_STRETCH if chosen else 1.0)
    limit = run.objective.itl_p99_s or (None if run.batch_job else max(times * _alone_s(run), NOTICEABLE_GAP_S))
    if limit is None or worst <= limit or run.stretched(limit) < STRETCHED_TOKEN_SHARE:
        return None
    # the deeper cause: such prompts need not be computed at all
    if run.not_found > REPEATED_PREFILL_SHARE * run.computed:
        return None
    alone = min(worst, _alone_s(run))
    return Finding(
        loop="product",
        cause="prefill_interference",
        rule="prefill_interference",
        share=1 - max(alone, limit) / worst if run.objective.itl_p99_s else 1 - alone / worst,
        says=f"one gap in a hundred between tokens is {seconds_text(worst)} or more, {worst / alone:.0f} times a step "
        f"without prompts: up to {_largest(run):,.0f} prompt tokens go into a step beside decodes",
        evidence=(
            Evidence(
                gauge="itl_p99_s",
                value=worst,
                expected=limit,
                against="objective" if run.objective.itl_p99_s else f"{times:g} × a step without prompts",
            ),
            Evidence(gauge="itl_p50_s", value=usual),
            Evidence(
                gauge="prefill_tokens",
                value=_largest(run),
                expected=float(run.serve.max_tokens_per_step),
                against="budget of a step",
            ),
        ),
    )


def graphs_off(reading: Reading, plan: Plan | None) -> Finding | None:
    """On a GPU without CUDA graphs, launches take longer than kernels: the device idles between kernels."""
    run = ServingRun(reading, plan)
    if run.serve.graphs or not _on_gpu(plan) or run.cost is None:
        return None
    achieved, waited = reading.get("engine_roofline_fraction"), reading.get("engine_wait_s")
    step = reading.get("engine_step_s")
    if waited is None or not step or waited >= HOST_BOUND_WAIT_SHARE * step:
        return None
    if achieved is not None and achieved > GRAPHS_ROOFLINE_FRACTION:
        return None
    share = 1 - waited / step
    evidence = [Evidence(gauge="engine_wait_s", value=waited, expected=step, against="a whole step")]
    if achieved is not None:
        evidence.append(
            Evidence(
                gauge="engine_roofline_fraction",
                value=achieved,
                expected=GRAPHS_ROOFLINE_FRACTION,
                against="launches hidden",
            )
        )
    return Finding(
        loop="inner",
        cause="launch_overhead",
        rule="graphs_off",
        share=share,
        says=f"CUDA graphs are off and the host is busy for {share:.0%} of a step of {seconds_text(step)}, launching "
        "kernels that the device is done with before the next comes",
        evidence=tuple(evidence),
    )


def deciding_alone(reading: Reading, plan: Plan | None) -> Finding | None:
    """Without overlap the device idles while the next step is scheduled."""
    run = ServingRun(reading, plan)
    decided, step = reading.get("engine_schedule_s"), reading.get("engine_step_s")
    if run.serve.overlap or not _on_gpu(plan) or not decided or not step or decided < SCHEDULE_SHARE * step:
        return None
    return Finding(
        loop="inner",
        cause="sync",
        rule="deciding_alone",
        share=min(0.99, decided / step),
        says=f"the device waits {seconds_text(decided)} of every {seconds_text(step)} while the next step is scheduled",
        evidence=(
            Evidence(
                gauge="engine_schedule_s",
                value=decided,
                expected=SCHEDULE_SHARE * step,
                against="most a healthy run has",
            ),
        ),
    )


def _alone_s(run: ServingRun) -> float:
    """Seconds of a mean decode step without prefill."""
    assert run.cost is not None
    return run.cost.decode_seconds(run.decoding, run.context)


def _largest(run: ServingRun) -> float:
    sizes = [
        float(step["prefill_tokens"])
        for step in run.reading.steps
        if step.get("decode_tokens") and step.get("prefill_tokens")
    ]
    return max(sizes, default=0.0)


def _on_gpu(plan: Plan | None) -> bool:
    return plan is not None and plan.cluster.chip.kind == "gpu"
