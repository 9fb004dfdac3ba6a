"""Rule on a server's metrics page: LoRA adapters that take turns in too few slots."""

from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.evidence.server_load import load_of
from armillary.diagnosis.evidence.thresholds import KV_FULL_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.page_levers import AT_MOST, flag_lever, page_finding, queue_share, queue_text, waits
from armillary.spec.plan import Plan


def adapter_thrashing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait, although the KV cache has room, because as many adapters run as a step may have: each waits until
    all requests of another are done, and is then loaded in its place."""
    load = load_of(reading)
    slots, running, waiting = (reading.get(f"adapter{name}") for name in ("_slots", "s_running", "s_waiting"))
    if load is None or not slots or running is None or running < slots or not waiting:
        return None
    if load.waiting < 1 or not waits(load) or (reading.get("kv_used_fraction") or 0.0) >= KV_FULL_SHARE:
        return None
    lever = flag_lever(
        reading,
        "serve.max_adapters",
        int(running + waiting),
        f"LoRA adapters per step {slots:.0f} → {running + waiting:.0f}",
        1.0,
        at_most=load.gain(load.running + load.waiting),
        risk="memory for each adapter, which the KV cache loses",
        basis=AT_MOST,
    )
    return page_finding(
        "adapter_thrashing",
        queue_share(load),
        f"{running:.0f} LoRA adapters fill all slots while {waiting:.0f} more wait for one; {queue_text(load)}",
        reading,
        ("adapter_slots", "adapters_running", "adapters_waiting", "waiting"),
        (lever,),
    )
