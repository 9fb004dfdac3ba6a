"""Rules on a job by what its cluster says of it: attempts that fail again and again, and pods without a place."""

from armillary.diagnosis.evidence.finding import Finding, Lever, Rule, measured
from armillary.diagnosis.evidence.thresholds import JOB_FAILURES
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan

_ACTIONS = {
    "OUT_OF_MEMORY": "ask for more host memory (--mem, resources.limits.memory), or fewer data.workers",
    "PREEMPTED": "save in time: train.save_every, and a signal before the end (docs/resilience.md)",
    "EVICTED": "ask for the memory and disk that the pod uses (resources.requests)",
    "TIMEOUT": "a longer --time, or a job that saves and requeues itself (docs/resilience.md)",
    "NODE_FAIL": "leave the node out (--exclude, cordon), and run armillary launch --check on it",
}
_READ_LOG = "read the end of the attempt's log: armillary launch logs"


def repeated_failures(reading: Reading, plan: Plan | None) -> Finding | None:
    """The job was started again and again; where only some nodes fail, they are named."""
    failures = reading.values.get("job_failures", 0.0)
    if failures < JOB_FAILURES:
        return None
    state, nodes = reading.settings.get("state", "FAILED"), reading.settings.get("nodes", "")
    lever = Lever(
        title=f"leave out {nodes}" if nodes else f"against {state}",
        action=f"--exclude={nodes}, and armillary launch --check there" if nodes else _ACTIONS.get(state, _READ_LOG),
        speedup=1.0,
        at_most=1 / (1 - min(0.95, reading.values["down_fraction"])) if "down_fraction" in reading.values else None,
        risk="fewer nodes" if nodes else "none",
        basis="the time between an end and the next start; work that was repeated is not on record",
    )
    where = f", always on {nodes}" if nodes else ""
    return Finding(
        loop="training",
        cause="memory_pressure" if state == "OUT_OF_MEMORY" else "failures",
        rule="repeated_failures",
        share=max(reading.values.get("down_fraction", 0.0), failures / (failures + 1)),
        evidence=measured(reading, "job_failures", "job_attempts", "down_fraction"),
        levers=(lever,),
        says=f"{failures:.0f} attempts ended early, most of them {state}{where}",
    )


def unschedulable(reading: Reading, plan: Plan | None) -> Finding | None:
    """Pods find no place."""
    times = reading.values.get("job_unschedulable", 0.0)
    if times < JOB_FAILURES or reading.values.get("job_failures", 0.0) >= JOB_FAILURES:
        return None
    lever = Lever(
        title="ask for what there is",
        action="kubectl describe pod names what lacks: fewer devices per pod, other node selectors or tolerations",
        speedup=1.0,
        basis="nothing runs until then",
    )
    return Finding(
        loop="training",
        cause="failures",
        rule="unschedulable",
        share=1.0,
        evidence=measured(reading, "job_unschedulable"),
        levers=(lever,),
        says=f"no node had a place for a pod, {times:.0f} times",
    )


RULES: tuple[Rule, ...] = (repeated_failures, unschedulable)
