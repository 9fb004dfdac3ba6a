"""The strategies that are held against one process, each on as many ranks as it can use."""

from __future__ import annotations

from armillary.spec.layout import Layout

STRATEGIES = {
    "DDP": dict(zero=0),
    "ZeRO-1": dict(zero=1),
    "ZeRO-2": dict(zero=2),
    "ZeRO-3 (FSDP2)": dict(zero=3),
    "HSDP": dict(zero=3, shard="half"),
    "tp": dict(tp="all", sequence_parallel=False),
    "tp + sp": dict(tp="all"),
    "DDP × tp": dict(tp=2, zero=0),
    "ZeRO-1 × tp": dict(tp=2, zero=1),
    "FSDP2 × tp": dict(tp=2, zero=3),
    "HSDP × tp": dict(tp=2, zero=3, shard="half"),
}


def layout_of(strategy: str, ranks: int, **also: object) -> Layout | None:
    """The strategy on that many ranks, in fp32; None where there are too few for it."""
    given = STRATEGIES[strategy]
    tp = ranks if given.get("tp") == "all" else int(given.get("tp", 1))  # type: ignore[call-overload]
    dp = ranks // tp
    shard = dp // 2 if given.get("shard") == "half" else None
    alone = given.get("tp") != "all" and dp < 2
    if alone or shard == 1:
        return None
    fields = {"zero": given.get("zero", 0), "sequence_parallel": given.get("sequence_parallel", True)}
    return Layout(dp=dp, tp=tp, shard=shard, precision="fp32", **fields, **also)  # type: ignore[arg-type]
